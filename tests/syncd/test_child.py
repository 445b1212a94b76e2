"""A program that is kept running: what makes it start again, give up, and end. Real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
from waiting import eventually

from protocol.errors import BusyError
from syncd.child import Child
from syncd.platform import Identity

Start = Callable[..., Child]


class Script(Child):
    """A shell script that works once it has printed "ready"."""

    name = "script"
    first_pause = 0.01
    most_pause = 0.01

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self.script = script
        self.changes: list[bool] = []
        self.ready = False
        self.tidied = False

    def command(self) -> list[str]:
        return ["sh", "-c", self.script]

    def prepare(self) -> None:
        self.ready = False

    def tidy(self) -> None:
        self.tidied = True

    def heard(self, line: str) -> bool:
        self.ready |= line == "ready"
        return line != "enough"

    def answers(self, timeout: float) -> bool:
        return self.ready

    def changed(self, works: bool) -> None:
        self.changes.append(works)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that keeps a script running, with other limits if they are given."""
    started: list[Child] = []

    def make(script: str, **limits: object) -> Script:
        child = Script(tmp_path / "run", script)
        for name, value in limits.items():
            setattr(child, name, value)
        started.append(child)
        child.start()
        return child

    yield make
    for child in started:
        child.close()


def alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_works_once_it_says_so_and_ends_with_its_owner(start):
    child = start("echo ready; exec sleep 1000")
    process = child.working(30)
    assert process.pid == child.pid
    child.close()
    assert (child.pid, child.closed, child.changes) == (None, True, [True, False])
    assert not alive(process.pid)
    child.close()


def test_one_that_ends_is_started_again_with_the_reason_that_it_gave(start, caplog):
    child = start("echo ready; sleep 0.05; echo out of luck >&2; exit 3")
    eventually(lambda: child.restarts > 1)
    assert "script ended (out of luck); starting it again" in caplog.text


def test_one_that_was_killed_is_not_said_to_have_ended_for_its_last_line(start):
    child = start("echo ready; exec sleep 1000")
    os.kill(child.working(30).pid, signal.SIGKILL)
    eventually(lambda: child.failure)
    assert child.failure == "signal 9 has ended it"


def test_one_that_never_works_is_given_up_after_a_second_try(start, tmp_path):
    child = start(f"echo >> {tmp_path}/tries; echo broken; exit 1")
    eventually(lambda: child.closed)
    assert child.failure == "broken"
    assert len((tmp_path / "tries").read_text().splitlines()) == 2


def test_or_is_tried_for_ever_if_it_may_work_later(start, tmp_path):
    child = start(f"[ -e {tmp_path}/go ] || exit 1; echo ready; sleep 1000", gives_up=False)
    eventually(lambda: child.restarts > 3)
    (tmp_path / "go").touch()
    assert child.working(30)


def test_pauses_double_up_to_the_longest(start, monkeypatch):
    pauses: list[float] = []
    child = Script(Path("unused"), "exit 1")
    child.first_pause, child.most_pause = 1.0, 10.0
    monkeypatch.setattr(child._closed, "wait", lambda seconds: pauses.append(seconds) or False)
    for failures in range(7):
        child._pause(failures)
    assert pauses == [0, 1, 2, 4, 8, 10, 10]


def test_one_that_hangs_before_it_works_counts_as_dead(start):
    child = start("echo waiting; exec sleep 1000", start_seconds=0.1)
    eventually(lambda: child.closed)
    assert child.failure.startswith("it did not work within 0 s; ")


def test_one_is_ended_while_it_starts(start, monkeypatch):
    asked = threading.Event()
    child = start(
        "exec sleep 1000", answers=lambda timeout: asked.set() or asked.wait(0.01) is None
    )
    assert asked.wait(10)
    pid = child._process.pid
    child.close()
    assert not alive(pid)


def test_one_that_says_that_it_is_of_no_use_is_replaced(start):
    child = start("echo ready; sleep 0.05; echo enough; exec sleep 1000")
    eventually(lambda: child.restarts > 1)
    assert child.failure == "enough"


def test_what_it_has_started_ends_with_it(start, tmp_path):
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; echo ready; wait"
    child = start(script)
    child.working(30)
    grandchild = int((tmp_path / "pid").read_text())
    assert alive(grandchild)
    os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: not alive(grandchild))
    eventually(lambda: int((tmp_path / "pid").read_text() or 0) != grandchild and child.pid)
    grandchild = int((tmp_path / "pid").read_text())
    child.close()
    eventually(lambda: not alive(grandchild))


def test_one_that_ignores_a_request_to_end_is_killed(start, monkeypatch):
    monkeypatch.setattr("syncd.child.STOP_SECONDS", 0.2)
    child = start("trap '' TERM; echo ready; while :; do sleep 1; done")
    pid = child.working(30).pid
    child.close()
    assert not alive(pid)


def test_a_program_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("syncd.child.die_with_parent", list)
    child = Script(tmp_path / "run", "")
    monkeypatch.setattr(child, "command", lambda: ["/no/such/program"])
    child.start()
    eventually(lambda: child.closed)
    child.close()
    assert child.failure == "/no/such/program: No such file or directory"


def test_a_disk_that_is_full_for_a_while_ends_nothing(start, monkeypatch):
    child = start("echo ready; exec sleep 1000")
    before = child.working(30).pid
    full = [OSError(errno.ENOSPC, "No space left on device", "/x")] * 3
    monkeypatch.setattr(child, "_record", lambda process: raise_next(full))
    monkeypatch.setattr(child, "prepare", lambda: raise_next(full))
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not full and child.pid not in (None, before))


def raise_next(errors: list[OSError]) -> None:
    if errors:
        raise errors.pop()


def test_a_line_without_an_end_does_not_fill_the_memory(start):
    script = f'{sys.executable} -c \'import sys; sys.stdout.write("x" * 300_000 + "\\n")\''
    child = start(f"{script}; echo ready; exec sleep 1000")
    assert child.working(30)


def test_nothing_of_ours_is_in_its_environment(start, monkeypatch, tmp_path):
    monkeypatch.setenv("SYNCD_KEY", "secret")
    child = start(f"env > {tmp_path}/env; echo ready; exec sleep 1000")
    assert child.working(30)
    assert "SYNCD_" not in (tmp_path / "env").read_text()


def left_by(owner: Identity, orphan: Identity) -> str:
    return json.dumps([part for each in (orphan, owner) for part in astuple(each)])


def test_what_another_one_that_lives_has_started_is_left_alone(start, tmp_path):
    orphan, owner = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    (tmp_path / "run").mkdir()
    record = tmp_path / "run" / "script.pid"
    record.write_text(left_by(*(Identity.of(each.pid) for each in (owner, orphan))))
    with pytest.raises(BusyError, match=f"process {owner.pid}, which has lost its lock"):
        start("echo ready; exec sleep 1000")
    assert orphan.poll() is None
    owner.kill()
    owner.wait()
    assert start("echo ready; exec sleep 1000").working(30)
    assert orphan.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("damage", [b"\xff", b"[1]", b"[]", b"{}", b"1", b'["x", "y", "z"]'])
def test_a_damaged_record_of_what_was_left_is_none(start, tmp_path, damage):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "script.pid").write_bytes(damage)
    assert start("echo ready; exec sleep 1000").working(30)


def test_one_whose_folder_was_moved_away_is_not_started_again(start, tmp_path):
    child = start("echo ready; exec sleep 1000")
    pid = child.working(30).pid
    assert not child.is_lost()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert child.is_lost()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: child.closed)
    assert child.failure == "its folder was moved or replaced while it ran"
    assert not (tmp_path / "run").exists()


def test_what_it_has_left_is_removed_at_the_end_if_its_folder_is_still_there(tmp_path):
    for moved in (False, True):
        child = Script(tmp_path / "run", "echo ready; exec sleep 1000")
        child.start()
        assert child.working(30)
        if moved:
            (tmp_path / "run").rename(tmp_path / "moved")
        child.close()
        assert child.tidied is not moved


def test_it_is_started_once(start):
    child = start("echo ready; exec sleep 1000")
    with pytest.raises(RuntimeError, match="script is started once"):
        child.start()
