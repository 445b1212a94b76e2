from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.logs import LogEnd, LogStart, drop_redraws, one_line, parse_log_line, stamp
from protocol.states import Result

SECONDS = st.integers(0, 4_000_000_000).map(float)
PRINTABLE = st.text(max_size=40).filter(str.isprintable)
RUNS = st.sampled_from(["pretrain.0001.7f3a", "sh.0012.00ff"])


@given(RUNS, st.integers(1, 99), SECONDS, PRINTABLE)
def test_a_header_is_read_back_as_it_was_written(run: str, attempt: int, time: float, command: str):
    start = LogStart(run_id=run, attempt=attempt, time=time, command=command)
    assert parse_log_line(start.line()) == start


@given(RUNS, SECONDS, st.integers(0, 10**7), st.sampled_from(Result), PRINTABLE)
def test_a_trailer_is_read_back_as_it_was_written(
    run: str, time: float, tenths: int, result: Result, cause: str
):
    end = LogEnd(run_id=run, attempt=1, time=time, seconds=tenths / 10, result=result, cause=cause)
    assert parse_log_line(end.line()) == end


@given(st.text())
@example("a\nb\r\x1b[2J\x85\u2028\ud800")
def test_a_command_of_several_lines_is_one_line_of_the_log(command: str):
    line = LogStart(run_id="a.0001.7f3a", attempt=1, time=0, command=command).line()
    assert len(line.decode().splitlines()) == 1
    assert one_line(one_line(command)) == one_line(command)


@given(st.binary() | st.binary().map(b"[syncd] end ".__add__))
@example(b"[syncd] start a attempt " + b"9" * 5000 + b" at 2026-11-30T07:45:00Z: x")
@example(b"[syncd] end a attempt 1 at 2026-11-30T07:45:00Z after 1.2.3 s: success")
@example(b"[syncd] end a attempt 1 at 2026-11-30T07:45:00Z after 1.0 s: happy")
@example(b"[syncd] end a attempt 1 at tomorrow after 1.0 s: success")
def test_other_lines_are_the_stages_own(line: bytes):
    assert parse_log_line(line) is None


@pytest.mark.parametrize("seconds", [1e20, -1e20, float("nan"), float("inf")])
def test_a_time_that_no_calendar_holds_can_be_shown(seconds: float):
    assert stamp(seconds) == "?"


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"plain\n", b"plain\n"),
        (b"10%\r20%\r30%\n", b"\r30%\n"),
        (b"a\n10%\r20%\n", b"a\n20%\n"),
        (b"a\r\nb\r\n", b"a\r\nb\r\n"),
        (b"10%\r20%\r", b"\r20%\r"),
        (b"10%", b"10%"),
        (b"", b""),
    ],
)
def test_redraws_are_dropped(data: bytes, kept: bytes):
    assert drop_redraws(data) == kept


def shown(data: bytes) -> list[bytes]:
    """What is left of each line on a screen where a redraw covers what it is drawn over."""
    return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in data.split(b"\n")]


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n"])).map(b"".join),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_segments_without_their_redraws_show_what_the_whole_shows(data: bytes, cuts: list[int]):
    edges = [0, *sorted(cuts), len(data)]
    segments = [data[a:b] for a, b in pairwise(edges)]
    kept = [drop_redraws(segment) for segment in segments]
    assert shown(b"".join(kept)) == shown(data)
    assert all(len(k) <= len(s) for k, s in zip(kept, segments, strict=True))
