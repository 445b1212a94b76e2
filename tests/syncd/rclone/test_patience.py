from __future__ import annotations

import time

import pytest

from syncd.rclone.errors import Fatal, NotFound, RemoteError, Transient
from syncd.rclone.patience import Patience


class Calls:
    """Makes calls that take as long as the test says, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.patience = Patience(10.0)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def call(self, takes: float, *, size: int = 0, error: type[RemoteError] | None = None) -> float:
        """Make a call, which is given up when its time is over; return what it was allowed."""
        with self.patience.waiting(size) as allowed:
            self.now += min(takes, allowed)
            if takes >= allowed:
                raise Transient("call", why="no answer")
            if error:
                raise error("call", why="told")
        return allowed

    def allowed(self) -> float:
        return self.call(0.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_a_server_that_is_always_slow_is_met_by_doubling_and_kept_so(calls: Calls) -> None:
    for _ in range(2):
        with pytest.raises(Transient):
            calls.call(25.0)
    assert calls.call(25.0) == 40.0
    assert [calls.call(25.0) for _ in range(3)] == [100.0] * 3


def test_it_has_an_end(calls: Calls) -> None:
    for _ in range(9):
        with pytest.raises(Transient):
            calls.call(1e9)
    assert calls.allowed() == 160.0


def test_a_quick_answer_brings_it_back(calls: Calls) -> None:
    with pytest.raises(Transient):
        calls.call(1e9)
    assert calls.call(0.1) == 20.0
    assert calls.allowed() == 10.0


@pytest.mark.parametrize("error", [Transient, NotFound, Fatal])
def test_an_error_that_was_told_at_once_changes_nothing(
    calls: Calls, error: type[RemoteError]
) -> None:
    with pytest.raises(error):
        calls.call(0.1, error=error)
    assert calls.allowed() == 10.0


def test_what_moves_bytes_is_given_time_for_them(calls: Calls) -> None:
    assert calls.call(18.0, size=1024 * 1024) == 74.0
    assert calls.allowed() == 10.0


def test_a_link_that_is_slower_than_we_thought_carries_a_chunk_in_the_end(calls: Calls) -> None:
    seconds = 16 * 1024 * 1024 / 4096  # at a limit of 4 KiB a second
    for _ in range(2):
        with pytest.raises(Transient):
            calls.call(seconds, size=16 * 1024 * 1024)
    calls.call(seconds, size=16 * 1024 * 1024)
    calls.call(seconds, size=16 * 1024 * 1024)
