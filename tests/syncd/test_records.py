"""The journal and the results: never lost, whatever a crash or a person does to their files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
import time

import pytest
from crashing import taken_back

from protocol.journal import JournalRecord
from protocol.results import Results, RunRecord
from protocol.states import Result, State
from syncd.records import JournalFile, ResultsFile
from syncd.state import State as Database

WORKER = "w-000001-7f3a9c02"


@pytest.fixture
def state(tmp_path):
    state = Database(tmp_path / "state.db")
    yield state
    state.close()


def step(number, state=State.CLAIMED, result=None, **more):
    return JournalRecord(
        number=number,
        line="run:pretrain",
        state=state,
        time=1.0,
        worker=WORKER,
        result=result,
        **more,
    )


STEPS = [
    step(1),
    step(1, State.STARTED, attempt=1),
    step(1, State.ENDED, Result.SUCCESS, attempt=1),
    step(2),
]
TEXT = b"".join(record.encode() for record in STEPS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(state, path):
    journal = JournalFile(state, path)
    for record in STEPS:
        assert journal.add(record)
    return journal


def asides(path):
    return sorted(path.parent.glob(f"{path.name}.edited-*"))


def test_a_record_is_in_the_file_as_soon_as_it_was_added(journal, path):
    assert path.read_bytes() == TEXT
    assert journal.newest[1].result is Result.SUCCESS
    assert dict(journal.newest) == {1: STEPS[2], 2: STEPS[3]}


def test_a_record_that_comes_twice_is_kept_once(journal, path):
    assert not journal.add(dataclasses.replace(STEPS[1], time=2.0))
    assert path.read_bytes() == TEXT


def test_a_torn_last_line_goes_and_nothing_is_set_aside(journal, path, state):
    path.write_bytes(TEXT + STEPS[0].encode()[:20])
    again = JournalFile(state, path)
    assert path.read_bytes() == TEXT
    assert asides(path) == []
    assert dict(again.newest) == dict(journal.newest)


def test_a_record_that_a_crash_left_in_the_file_alone_counts(journal, path, state):
    last = step(2, State.STARTED, attempt=1)
    path.write_bytes(TEXT + last.encode())
    again = JournalFile(state, path)
    assert again.newest[2] == last
    assert not again.add(last)
    assert asides(path) == []


def test_a_state_that_was_lost_is_filled_from_the_file(journal, path, tmp_path):
    fresh = Database(tmp_path / "fresh.db")
    assert dict(JournalFile(fresh, path).newest) == dict(journal.newest)
    assert asides(path) == []
    fresh.close()


LINES = TEXT.splitlines(keepends=True)


@pytest.mark.parametrize(
    "edited",
    [
        b"".join(LINES[:2] + LINES[3:]),  # a line was taken out
        b"".join(LINES[:3]),  # the last one was
        TEXT.removesuffix(b"\n"),  # an editor that strips the last line's end
        TEXT.replace(b'"success"', b'"failed"'),  # as many records, and one is false
        TEXT + LINES[0],  # a record is there twice
        TEXT + b"what is this\n",
        b"\xef\xbb\xbf" + TEXT,
        TEXT.replace(b"\n", b"\r\n"),
        LINES[0] + step(7).encode() + b"".join(LINES[1:]),  # one was slipped in
    ],
)
def test_an_edited_journal_is_set_aside_and_written_anew(journal, path, state, edited, caplog):
    path.write_bytes(edited)
    again = JournalFile(state, path)
    assert path.read_bytes() == TEXT
    assert dict(again.newest) == dict(journal.newest)
    (aside,) = asides(path)
    assert aside.read_bytes() == edited
    assert "was changed by hand" in caplog.text


def test_the_line_that_is_no_record_is_named(journal, path, state, caplog):
    path.write_bytes(TEXT + b"what is this\n")
    JournalFile(state, path)
    assert "line 5: " in caplog.text


def test_two_edits_within_a_second_are_both_kept(journal, path, state):
    for edited in (b"one\n", b"two\n"):
        path.write_bytes(edited)
        JournalFile(state, path)
    assert [aside.read_bytes() for aside in asides(path)] == [b"one\n", b"two\n"]


def test_a_deleted_journal_is_written_anew(journal, path, state):
    path.unlink()
    JournalFile(state, path)
    assert path.read_bytes() == TEXT


def test_an_edit_under_a_running_daemon_is_noticed_at_the_next_record(journal, path):
    path.write_bytes(LINES[0])
    last = step(3)
    journal.add(last)
    assert path.read_bytes() == TEXT + last.encode()
    assert [aside.read_bytes() for aside in asides(path)] == [LINES[0]]


def test_records_of_a_transaction_that_was_taken_back_are_not_doubled(journal, path, state):
    later = [step(3), step(4)]
    for _ in range(3):
        with taken_back(state):
            for record in later:
                journal.add(record)
        assert 3 not in journal.newest
    for record in later:
        journal.add(record)
    assert path.read_bytes() == TEXT + b"".join(record.encode() for record in later)
    assert journal.newest[4] == later[1]
    assert asides(path) == []


def test_a_full_disk_leaves_file_and_state_as_they_were(journal, path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("syncd.records.append_durable", full)
    with pytest.raises(OSError, match="No space"):
        journal.add(step(3))
    monkeypatch.undo()
    assert 3 not in journal.newest
    assert journal.add(step(3))
    assert path.read_bytes() == TEXT + step(3).encode()


def test_the_newest_records_can_be_gone_through_while_others_are_added(state, path):
    journal = JournalFile(state, path)
    done = threading.Event()

    def add():
        for number in range(1, 50):
            journal.add(step(number))
        done.set()

    thread = threading.Thread(target=add)
    thread.start()
    while not done.is_set():
        assert all(record.number for record in journal.newest.values())
        assert len(list(journal.newest)) <= 49
    thread.join()
    assert len(journal.newest) == 49


def test_the_cost_of_a_record_does_not_grow_with_their_number(state, path):
    line = "INSERT INTO journal (key, record) VALUES (?, ?)"
    with state.transaction():
        for number in range(1, 5_001):
            record = step(number)
            state.run(line, json.dumps(record.key), record.encode().decode())
    path.write_bytes(b"".join(step(n).encode() for n in range(1, 5_001)))
    journal = JournalFile(state, path)
    began = time.process_time()
    for number in range(5_001, 5_041):
        journal.add(step(number))
    assert (time.process_time() - began) / 40 < 0.004


def test_what_came_after_a_place_is_told_within_a_budget(journal):
    everything = journal.since(0, 10**6)
    assert [record for _, record in everything] == STEPS
    assert [record for _, record in journal.since(everything[1][0], 10**6)] == STEPS[2:]
    assert len(journal.since(0, 0)) == 1  # something, always: it goes on
    assert journal.since(everything[-1][0], 10**6) == []
    assert journal.place(STEPS[2]) == everything[2][0]
    assert journal.at(everything[2][0]) == STEPS[2]
    assert journal.place(step(99)) == 0


# Results


def run(number, result=Result.SUCCESS, **more):
    return RunRecord(
        run_id=f"pretrain.{number:04d}.7f3a", stage="pretrain", line="run:pretrain",
        result=result, ended=float(number), **more,
    )  # fmt: skip


@pytest.fixture
def immutable(path):
    """A journal's file that nobody can write to, until `mend` is called."""
    path.touch()
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("no file can be made immutable here")

    def mend():
        subprocess.run(["chattr", "-i", path], check=True)

    yield mend
    mend()


def test_a_copy_that_cannot_be_written_records_all_the_same_and_is_written_later(
    state, path, immutable
):
    journal = JournalFile(state, path, copy=True)
    for record in STEPS[:3]:
        assert journal.add(record)
    assert "Operation not permitted" in journal.problem
    assert journal.newest[1].result is Result.SUCCESS
    journal = JournalFile(state, path, copy=True)  # nor is it lost by a restart
    assert journal.problem
    assert journal.newest[1].result is Result.SUCCESS
    immutable()
    journal.add(STEPS[3])
    assert path.read_bytes() == TEXT
    assert not journal.problem


def test_a_workers_own_journal_that_cannot_be_written_records_nothing(state, path, immutable):
    journal = JournalFile(state, path)
    with pytest.raises(OSError, match="not permitted"):
        journal.add(STEPS[0])
    assert not journal.newest


@pytest.fixture
def results_path(tmp_path):
    return tmp_path / "results.json"


def test_a_result_is_in_the_file_once_it_was_published(state, results_path):
    results = ResultsFile(state, results_path)
    results.publish()
    assert Results.load(results_path).runs == {}
    assert results.add(run(1))
    results.publish()
    assert list(Results.load(results_path).runs.values()) == [run(1)]
    assert results.get(run(1).run_id) == run(1)
    assert results.get("gate.0001.7f3a") is None


def test_a_result_that_says_nothing_new_is_no_news_and_one_that_does_comes_again(
    state, results_path
):
    results = ResultsFile(state, results_path)
    results.add(run(1))
    results.add(run(2))
    assert not results.add(run(1))
    place = results.since(0)[-1][0]
    assert results.add(run(2, Result.LOST))  # the newest of all, changed: its place is new
    assert [r for _, r in results.since(place)] == [run(2, Result.LOST)]


def test_an_edited_results_file_is_set_aside_and_written_anew(state, results_path):
    results = ResultsFile(state, results_path)
    results.add(run(1, Result.FAILED))
    results.publish()
    written = results_path.read_bytes()
    edited = written.replace(b'"failed"', b'"success"')
    results_path.write_bytes(edited)
    results.publish()
    assert results_path.read_bytes() == written
    assert [aside.read_bytes() for aside in asides(results_path)] == [edited]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99, "runs": {}}', b"\xff"])
def test_what_is_no_results_file_is_set_aside(state, results_path, content):
    results_path.write_bytes(content)
    ResultsFile(state, results_path).publish()
    assert Results.load(results_path).runs == {}
    assert [aside.read_bytes() for aside in asides(results_path)] == [content]


def test_a_folder_in_the_place_of_the_results_is_set_aside(state, results_path):
    results_path.mkdir()
    ResultsFile(state, results_path).publish()
    assert Results.load(results_path).runs == {}


def test_a_deleted_results_file_is_written_anew(state, results_path):
    results = ResultsFile(state, results_path)
    results.add(run(1))
    results.publish()
    results_path.unlink()
    results.publish()
    assert list(Results.load(results_path).runs) == [run(1).run_id]
    assert asides(results_path) == []


def test_nothing_is_written_when_nothing_changed(state, results_path):
    results = ResultsFile(state, results_path)
    results.add(run(1))
    results.publish()
    before = results_path.stat()
    results.publish()
    assert results_path.stat() == before


def test_a_result_of_a_transaction_that_was_taken_back_is_published_when_it_comes_again(
    state, results_path
):
    results = ResultsFile(state, results_path)
    with taken_back(state):
        results.add(run(1))
    results.publish()
    assert Results.load(results_path).runs == {}
    assert results.add(run(1))
    results.publish()
    assert list(Results.load(results_path).runs) == [run(1).run_id]
