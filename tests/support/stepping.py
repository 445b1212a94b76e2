"""Both ends inside the test's process, without threads: a test does their rounds one by one.

The daemons are the real ones, on real folders and real state; a clock that the test moves, and
attempts that the test ends, stand for time and for processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.journal import JournalRecord, fold, parse_journal
from protocol.paths import Layout
from protocol.publish import publish_json
from protocol.states import Result, State
from protocol.wire import Role
from syncd.config import Key, Settings, make_private
from syncd.controller import Controller
from syncd.daemon import Daemon
from syncd.platform import Identity
from syncd.rclone.remote import Remote
from syncd.stages import attempt
from syncd.stages.attempt_files import (
    EXIT,
    STAGE,
    STOP,
    SUPERVISOR,
    LogFile,
    StageStart,
    StopRequest,
    read_file,
    read_spec,
)
from syncd.stages.causes import ExitRecord, StopReason
from syncd.worker import Worker


class Clock:
    """`time` as the test wants it: the real one, and as much more as was added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for name in ("time", "monotonic"):
            real = getattr(time, name)
            monkeypatch.setattr(time, name, lambda real=real: real() + self.ahead)
        real_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(self.ahead * 1e9))

    def advance(self, seconds: float) -> None:
        self.ahead += seconds


class StandingClock(Clock):
    """`time` that goes on only as the test lets it, and by a little whenever it is asked.

    It is far after the times of any file, so that none of them seems to have changed just now.
    """

    TICK = 1e-4

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 4e9
        monkeypatch.setattr(time, "time", self._read)
        monkeypatch.setattr(time, "monotonic", self._read)
        monkeypatch.setattr(time, "time_ns", lambda: int(self._read() * 1e9))

    def _read(self) -> float:
        self.ahead += self.TICK
        return self.ahead


class Attempts:
    """Stands for supervisors and stages: what was spawned, and how the test lets it go on.

    An attempt that is alive carries this process's identity; one that has ended, nobody's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: dict[Path, str] = {}
        self.spawned: Counter[str] = Counter()
        self.ended: dict[str, list[ExitRecord]] = {}
        self.doubled: list[str] = []
        monkeypatch.setattr(attempt, "spawn", self._spawn)
        monkeypatch.setattr(attempt, "request_stop", self._request_stop)

    def _spawn(self, folder: Path) -> None:
        if (folder / EXIT).exists() or (folder / STAGE).exists():
            return
        run_id = folder.parent.name
        if any(other.parent == folder.parent for other in self.alive):
            self.doubled.append(run_id)
        me = Identity.of(os.getpid())
        assert me is not None
        publish_json(folder / SUPERVISOR, dataclasses.asdict(me))
        if (folder / STOP).exists():
            self._end(folder, Result.STOPPED, "stopped before it started", None)
            return
        start = StageStart(identity=me, time=time.time())
        publish_json(folder / STAGE, dataclasses.asdict(start))
        self.spawned[run_id] += 1
        self.alive[folder] = run_id
        self.write(folder, f"[{run_id}] attempt {folder.name} began\n".encode())

    def _request_stop(self, folder: Path, reason: StopReason) -> None:
        if not (folder / EXIT).exists() and not (folder / STOP).exists():
            request = StopRequest(reason=reason, time=time.time())
            publish_json(folder / STOP, dataclasses.asdict(request))

    def write(self, folder: Path, data: bytes) -> None:
        """Append to the log of an attempt."""
        with contextlib.closing(LogFile(Path(read_spec(folder).log))) as log:
            log.line(data)

    def finish(self, folder: Path, code: int = 0) -> None:
        """Let an attempt end by itself, or as it was asked to."""
        if read_file(folder / STOP, StopRequest) is not None:
            self._end(folder, Result.STOPPED, "stopped", None)
        else:
            self._end(folder, Result.FAILED if code else Result.SUCCESS, f"exit {code}", code)

    def _end(self, folder: Path, result: Result, cause: str, code: int | None) -> None:
        run_id = folder.parent.name
        record = ExitRecord(
            run_id=run_id,
            attempt=int(folder.name.rpartition("-")[2]),
            result=result,
            cause=cause,
            exit_code=code,
            started=time.time(),
            ended=time.time(),
        )
        self.write(folder, record.log_end().line())
        publish_json(folder / EXIT, dataclasses.asdict(record))
        nobody = Identity(2**22 + 1, "0", "")
        publish_json(folder / SUPERVISOR, dataclasses.asdict(nobody))
        self.alive.pop(folder, None)
        self.ended.setdefault(run_id, []).append(record)

    def vanish(self, below: Path) -> None:
        """Let all attempts of a machine go with it."""
        self.alive = {f: r for f, r in self.alive.items() if not f.is_relative_to(below)}


@contextlib.contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder in memory, where there is one: a power cut is not what steps are about."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="syncd-", dir=parent) as folder:
        yield Path(folder)


class SteppedEnd:
    """One end, whose daemon does a round when it is told to."""

    def __init__(self, root: Path, role: Role, remote: Remote, key: Key) -> None:
        self.layout = Layout(root)
        self.role = role
        self.remote = remote
        self.daemon: Daemon | None = None
        self.fenced = False
        self.settings: dict[str, Any] = {}  # more than role and remote
        self._stack = contextlib.ExitStack()
        make_private(self.layout)
        if not self.layout.key.exists():
            key.save(self.layout)

    def start(self) -> None:
        """Start the daemon, if it does not run. What `open` raises is as if it had been killed."""
        if self.daemon is not None:
            return
        kind = Controller if self.role is Role.CONTROLLER else Worker
        settings = Settings(role=self.role, remote="fake:", **self.settings)
        daemon = kind(self.layout, settings, remote=self.remote)
        try:
            daemon.open(self._stack)
        except BaseException:
            self._stack.close()
            raise
        self.daemon = daemon

    def kill(self) -> None:
        """Forget all that is only in memory."""
        self.daemon = None
        self._stack.close()

    def has_ended(self) -> bool:
        """Whether its daemon ends by itself."""
        return self.daemon is not None and self.daemon._stopping.is_set()

    def leave(self) -> None:
        """Let the daemon end in good order, with its last words."""
        assert self.daemon is not None
        self.daemon._say_goodbye()
        self.kill()

    def step(self, name: str) -> None:
        """Do one round of a loop, by its name."""
        for loop in self.daemon._loops() if self.daemon else ():
            if loop.name == name and self.daemon:
                self.daemon.step(loop)
        if self.daemon and self.daemon._stopping.is_set():
            self.fenced = self.daemon.fenced is not None

    def loops(self) -> Iterator[str]:
        """The names of its loops, in the order in which what they do goes on its way."""
        yield from ("pull", "main", "bulk", "push")
        if self.role is Role.CONTROLLER:
            yield "serve"
        else:
            yield "checkpoints"
        yield "mirror"

    def records(self) -> list[JournalRecord]:
        """Every record of its own journal."""
        path = self.layout.journal
        records, problems = parse_journal(path.read_bytes()) if path.exists() else ([], [])
        assert not problems
        return records

    def journal(self) -> dict[int, JournalRecord]:
        """Every command's newest record, by its own journal."""
        return fold(self.records())

    def open_commands(self) -> list[int]:
        """Numbers of commands that have not ended, by its own journal."""
        return [n for n, record in self.journal().items() if record.state is not State.ENDED]
