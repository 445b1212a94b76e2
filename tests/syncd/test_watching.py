"""A daemon that is started from here: its environment, and what becomes of it."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from ends import Ends
from waiting import eventually

from protocol.errors import RunFailedError
from protocol.paths import Layout
from syncd.view import is_watched
from syncd.watching import Watch, environment


def test_the_stages_run_the_python_that_runs_the_daemon(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = shutil.which("python", path=environment()["PATH"])
    assert found is not None
    assert Path(found).parent == Path(sys.executable).parent


def test_a_daemon_knows_nothing_of_the_callers_own_end(monkeypatch):
    monkeypatch.setenv("SYNCD_REMOTE", "drive:mine")
    assert not [name for name in environment() if name.startswith("SYNCD_")]


def test_a_daemon_runs_while_the_block_does(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    with Watch(layout, local_ends.folder / "output").running():
        eventually(lambda: is_watched(layout), within=60, what="it does not run")
    assert not is_watched(layout)


def test_a_daemon_that_ended_by_itself_is_told_with_its_last_line(tmp_path: Path) -> None:
    watch = Watch(Layout(tmp_path), tmp_path / "output")

    def has_failed() -> bool:
        try:
            watch.check()
        except RunFailedError:
            return True
        return False

    watch.start()
    eventually(has_failed, within=60)
    with pytest.raises(RunFailedError, match=r"ended by itself: .*syncd\.toml"):
        watch.check()
    watch.stop()


def test_wherever_an_interrupt_comes_while_it_is_looked_after_it_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.watching.die_with_parent", lambda command: ["sleep", "1000"])
    for instruction in itertools.count(1):
        watch = Watch(Layout(tmp_path), tmp_path / "output")
        watch.start()
        interrupted = interrupt_at(instruction, watch.check)
        watch.stop()  # this test has a time-out
        if not interrupted:
            break
    assert instruction > 10  # so many places were tried


def interrupt_at(instruction: int, act: Callable[[], None]) -> bool:
    """Call `act` and raise KeyboardInterrupt before its n-th instruction; whether it has so many.

    A signal is handled between any two.
    """
    left = instruction

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
