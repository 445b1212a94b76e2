import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.journal import JournalRecord, advance, fold, parse_journal, parse_record
from protocol.states import Result, State, is_legal

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
STATES = st.sampled_from([s for s in State if s is not State.ENDED])


@st.composite
def records(draw: st.DrawFn) -> JournalRecord:
    ended = draw(st.booleans())
    return JournalRecord(
        number=draw(st.integers(1, 3)),
        line=draw(TEXT),
        state=State.ENDED if ended else draw(STATES),
        time=draw(st.floats(0, 1e10)),
        worker=draw(TEXT),
        run_id=draw(TEXT),
        attempt=draw(st.integers(0, 9)),
        snapshot=draw(st.integers(0, 9)),
        result=draw(st.sampled_from(Result)) if ended else None,
        cause=draw(TEXT) if ended else "",
        exit_code=draw(st.none() | st.integers(0, 255)),
        signal=draw(st.none() | st.integers(1, 64)),
        started=draw(st.none() | st.floats(0, 1e10)),
    )


def record(number: int, state: State, **more) -> JournalRecord:
    result = Result.SUCCESS if state is State.ENDED else None
    fields = {"line": "run:a", "time": 0.0, "worker": "w", **more}
    return JournalRecord(number=number, state=state, result=result, **fields)


@given(records())
def test_a_record_is_one_line_and_read_back_as_it_was_written(written: JournalRecord):
    line = written.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_record(line) == written


@given(st.lists(records(), max_size=8))
def test_a_journal_is_read_back_as_it_was_written(written: list[JournalRecord]):
    assert parse_journal(b"".join(r.encode() for r in written)) == (written, [])


def test_a_cause_with_a_file_name_in_another_encoding_can_be_read():
    written = record(1, State.CLAIMED, cause="cannot read caf\udce9")
    assert parse_record(written.encode()).cause == "cannot read caf?"


@given(st.binary(max_size=200))
def test_any_bytes_are_records_and_problems(data: bytes):
    found, problems = parse_journal(data)
    assert len(found) + len(problems) == sum(bool(line.strip()) for line in data.splitlines())


@given(
    st.binary(max_size=60) | st.recursive(st.none(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_a_line_that_is_no_record_is_a_value_error(line: bytes):
    with pytest.raises(ValueError, match=r"."):
        parse_record(line)


def test_a_torn_last_line_is_a_problem_and_the_rest_is_read():
    whole = record(1, State.CLAIMED)
    found, (problem,) = parse_journal(whole.encode() * 2 + whole.encode()[:-1])
    assert found == [whole, whole]
    assert (problem.line_number, problem.why) == (3, "cut short")


@pytest.mark.parametrize(
    "change",
    [
        {"state": "ended"},
        {"result": "success"},
        {"number": 0},
        {"state": "done"},
        {"time": "now"},
        {"number": 2**63},
        {"attempt": True},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, object]):
    value = {**json.loads(record(1, State.CLAIMED).encode()), **change}
    with pytest.raises(ValueError, match=r"JournalRecord|State"):
        parse_record(json.dumps(value).encode())


def test_keys_of_a_newer_writer_are_passed_over():
    whole = record(1, State.CLAIMED)
    value = {**json.loads(whole.encode()), "mood": "good"}
    assert parse_record(json.dumps(value).encode()) == whole


@given(st.lists(records(), max_size=12))
def test_folding_follows_legal_steps_only(history: list[JournalRecord]):
    newest: dict[int, JournalRecord] = {}
    for at in range(len(history)):
        now = fold(history[: at + 1])
        for number, found in now.items():
            before = newest.get(number)
            if found != before and (before is None or before.worker == found.worker):
                assert is_legal(before.state if before else State.QUEUED, found.state)
            elif found != before:
                assert before is None or found.worker > before.worker
        newest = now


def test_a_newer_workers_word_goes_before_an_older_ones_whatever_their_order():
    old, new = "w-000001-ffffffff", "w-000002-00000000"
    ended = record(1, State.ENDED, attempt=1, worker=old)
    again = record(1, State.CLAIMED, worker=new)
    assert fold([ended, again]) == fold([again, ended]) == fold([ended, again, ended]) == {1: again}


def test_advancing_says_whether_a_record_was_the_next_step():
    newest: dict[int, JournalRecord] = {}
    assert advance(newest, record(1, State.CLAIMED))
    assert not advance(newest, record(1, State.CLAIMED))
    assert advance(newest, record(2, State.ENDED))
    assert {number: found.state for number, found in newest.items()} == {1: "claimed", 2: "ended"}


def test_a_record_that_arrives_twice_or_late_changes_nothing():
    life = [
        record(1, State.CLAIMED),
        record(1, State.STARTED, attempt=1),
        record(1, State.STARTED, attempt=2),
        record(1, State.ENDED, attempt=2),
    ]
    assert fold(life)[1] == life[-1]
    assert fold([*life, *life])[1] == life[-1]
    assert fold([*life[:3], life[0]])[1] == life[2]


def test_two_records_of_one_step_have_one_key():
    assert (
        record(1, State.STARTED, attempt=1).key == record(1, State.STARTED, attempt=1, cause="").key
    )
    assert record(1, State.STARTED, attempt=1).key != record(1, State.STARTED, attempt=2).key
