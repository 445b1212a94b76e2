"""A program that is kept running: started, started again whenever it ends, and ended with us.

A thread of ours starts it, copies what it prints into a log, and starts it again, later and later
while it does not work. It dies with this process, also when that is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from protocol.errors import BusyError, UserError
from protocol.publish import publish_bytes, remove_leftovers
from syncd.platform import (
    KILL,
    Identity,
    Lock,
    die_with_parent,
    exclusive_lock,
    own_session,
    signal_group,
)
from syncd.rclone.endpoint import private_folder

STOP_SECONDS = 2.0
STABLE_SECONDS = 10.0  # one that worked for so long is started again at once
LOG_BYTES = 256 * 1024
LINE_BYTES = 64 * 1024
MOST_DOUBLINGS = 20  # of a pause, which has its limit long before
LOST = "its folder was moved or replaced while it ran"

log = logging.getLogger(__name__)


class Child(ABC):
    """One program of one daemon. `folder` is made 0700 and holds its lock, process id and log.

    Subclasses say what to run, and when it works. `start_seconds` is how long it may take until it
    does; it counts as dead then. The pauses between two starts double from `first_pause` on. One
    that has never worked is given up when it `gives_up`, after a second try.
    """

    name: ClassVar[str]  # of its files, and in messages
    start_seconds = 30.0
    first_pause = 0.1
    most_pause = 10.0
    gives_up = True
    foreign: ClassVar[tuple[str, ...]] = ()  # beginnings of variables that it does not inherit

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restarts = 0
        self.failure = ""  # why the last one ended
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None  # the one there is, if any
        self._running: subprocess.Popen[bytes] | None = None  # the same, once it works
        self._by_signal = False  # whether the last one was ended by one
        self._thread: threading.Thread | None = None
        self._hurried = threading.Event()
        self._lock: Lock | None = None  # while the folder is ours
        self._cleanup = contextlib.ExitStack()

    # For subclasses

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line; never with a secret, since every user can read it."""

    @abstractmethod
    def answers(self, timeout: float) -> bool:
        """Whether the one that was started last works; `timeout` in seconds bounds the look."""

    def environ(self) -> Mapping[str, str]:
        """Return the variables to add to its environment."""
        return {}

    def prepare(self) -> None:  # noqa: B027 (nothing to do for most)
        """Called before each start: clear what one that is gone has left. Raises OSError and
        UserError, as when it does not start."""

    def tidy(self) -> None:  # noqa: B027
        """Called at the end, when none runs any more: remove what is of no use to the next."""

    def heard(self, line: str) -> bool:
        """Called with each line that it prints; return False to have it ended."""
        return True

    def reason(self, line: str) -> str:
        """Return what to say if it ends after this line; "" for one that tells nothing of that."""
        return line

    def changed(self, works: bool) -> None:  # noqa: B027
        """Called when one begins to work, and when it has ended; in the thread that keeps it."""

    # For the owner

    @property
    def closed(self) -> bool:
        """Whether none runs, nor will."""
        return self._closed.is_set()

    @property
    def hurried(self) -> bool:
        """Whether nobody is to wait for it any more."""
        return self._hurried.is_set()

    @property
    def pid(self) -> int | None:
        """The process id of the one that works now, or None between two."""
        with self._changed:
            return self._running.pid if self._running else None

    def start(self) -> None:
        """Begin to keep it running; returns before it works.

        Raises BusyError when another process uses the folder, RemoteError for one that is another
        user's.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self.name} is started once")
        folder = private_folder(self.folder)
        with contextlib.ExitStack() as stack:
            path = folder / f"{self.name}.lock"
            lock = exclusive_lock(path, f"start {self.name}", patience=1.0)
            self._lock = stack.enter_context(lock)
            remove_leftovers(folder)
            self._end_orphan()
            stack.callback(self._leave)
            self._cleanup = stack.pop_all()
        # It dies with the thread that starts it, so that thread is one that stays.
        self._thread = threading.Thread(target=self._supervise, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it and give the folder free. Safe to call twice."""
        self._closed.set()
        with self._changed:
            process = self._process
            self._changed.notify_all()
        if process:
            signal_group(process, signal.SIGTERM)
        if self._thread:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and process:
                _kill(process)
                self._thread.join(STOP_SECONDS)
        self._cleanup.close()

    def hurry(self) -> None:
        """Let nobody wait any more until one works: it is to be closed soon."""
        self._hurried.set()
        with self._changed:
            self._changed.notify_all()

    def is_lost(self) -> bool:
        """Whether its folder is not where it was: moved, replaced or emptied while it ran.

        Another may use that place now, so none is started again, and what is there stays.
        """
        return self._lock is not None and self._lock.is_lost()

    def working(self, timeout: float) -> subprocess.Popen[bytes] | None:
        """Return the process that works, at once or after a restart; None after `timeout` seconds,
        when closed, and at once after `hurry`."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self.closed or self.hurried, timeout)
            return self._running

    def kill_if_silent(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        """Kill a process that `answers` finds wanting; another is started."""
        if not self.answers(timeout) and process.poll() is None:
            log.warning("%s (pid %d) does not work; starting it again", self.name, process.pid)
            _kill(process)

    def _leave(self) -> None:
        lost, self._lock = self.is_lost(), None
        if not lost:
            self.tidy()

    # The thread that owns the process

    def _supervise(self) -> None:
        try:
            with contextlib.closing(_bounded_log(self.folder / f"{self.name}.log")) as sink:
                self._keep_running(sink)
        except BaseException as error:
            self.failure = f"the thread that runs {self.name} failed: {error}"
            raise
        finally:
            self._closed.set()
            self._set_running(None)

    def _keep_running(self, sink: logging.Handler) -> None:
        failures = 0
        ever_worked = False
        while True:
            if self.is_lost():
                self.failure = LOST
                return
            began = time.monotonic()
            try:
                worked = self._run_once(sink)
            except OSError as error:  # no such program; a full disk
                self.failure = f"{error.filename or self.name}: {error.strerror or error}"
                worked = False
            except UserError as error:
                self.failure = str(error)
                worked = False
            ever_worked |= worked
            # One that never worked is tried once more; for as long as `start` waits, if a signal
            # ended it: then it was killed, and nothing is wrong with it.
            hopeless = not ever_worked and failures > 0 and not self._by_signal
            if self.closed or (self.gives_up and hopeless):
                return
            self.restarts += 1
            stable = worked and time.monotonic() - began > STABLE_SECONDS
            failures = 0 if stable else min(failures + 1, MOST_DOUBLINGS)
            if self._pause(failures):
                return

    def _pause(self, failures: int) -> bool:
        """Wait before the next start, after so many bad ones; return whether we were closed."""
        seconds = min(self.most_pause, self.first_pause * 2 ** (failures - 1)) if failures else 0.0
        soon = f" in {seconds:.0f} s" if seconds >= 1 else ""
        log.warning("%s ended (%s); starting it again%s", self.name, self.failure, soon)
        return self._closed.wait(seconds)

    def _run_once(self, sink: logging.Handler) -> bool:
        """Run one until it ends; return whether it ever worked. Raises OSError."""
        self._by_signal = False
        self.prepare()
        self._process = process = self._spawn()
        output = _Output(process, sink, self)
        worked = late = False
        try:
            self._record(process)
            worked = self._until_works(process)
            if worked:
                self._set_running(process)
                self.changed(True)
            late = process.poll() is None and not worked and not self.closed
            if not worked or self.closed:
                _kill(process)
            process.wait()
        finally:
            _kill(process)  # or what it has left in its group, which holds the pipe
            code, last = process.wait(), output.join()
            self._by_signal = code < 0 and not late and not output.stopped
            self.failure = self._why(code, last, late)
            self._process = None
            self._set_running(None)
        if worked:
            self.changed(False)
        return worked

    def _why(self, code: int, last: str, late: bool) -> str:
        """Say why one has ended: with this exit code, after this line."""
        if late:
            return f"it did not work within {self.start_seconds:.0f} s; {last}"
        if self._by_signal:
            return f"signal {-code} has ended it"
        return last or f"it ended with {code}"

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Ours are not for it, the key in one of them least of all.
        foreign = (*self.foreign, "SYNCD_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return subprocess.Popen(
            die_with_parent(self.command()),
            env={**environ, **self.environ()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **own_session(),  # an interrupt is for the daemon, which closes it last
        )

    def _set_running(self, process: subprocess.Popen[bytes] | None) -> None:
        with self._changed:
            self._running = process
            self._changed.notify_all()

    def _record(self, process: subprocess.Popen[bytes]) -> None:
        """Note which process this is, and whose, for `_end_orphan` of a later daemon."""
        found = [Identity.of(pid) for pid in (process.pid, os.getpid())]
        record = [part for each in found if each for part in (each.pid, each.start, each.boot)]
        if found[0]:
            text = json.dumps(record)
            publish_bytes(self.folder / f"{self.name}.pid", text.encode("utf-8"), mode=0o600)

    def _until_works(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + self.start_seconds
        while process.poll() is None and time.monotonic() < deadline:
            if self.answers(1.0):
                return True
            if self._closed.wait(0.01):
                return False
        return False

    def _end_orphan(self) -> None:
        """Kill what a daemon that died has left where there is no parent-death signal.

        Raises BusyError when that daemon is alive: it has lost its lock, not what it started.
        """
        path = self.folder / f"{self.name}.pid"
        try:
            record = json.loads(path.read_text("utf-8"))
            orphan, *owners = [
                Identity(int(pid), str(start), str(boot))
                for pid, start, boot in zip(*[iter(record)] * 3, strict=True)
            ]
        except (OSError, ValueError, TypeError):
            return
        if any(owner.pid != os.getpid() and owner.alive() for owner in owners) and orphan.alive():
            why = f"process {owners[0].pid}, which has lost its lock there, still uses the folder"
            raise BusyError(f"start {self.name}", path=path, why=why, hint="Stop that one first.")
        if orphan.signal(KILL):
            log.warning("ended %s (pid %d), left by a daemon that died", self.name, orphan.pid)


class _Output:
    """Copies what a process prints to a log, line by line, in a thread of its own."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sink: logging.Handler,
        child: Child,
    ) -> None:
        self._process = process
        self._sink = sink
        self._child = child
        self._last = ""
        self.stopped = False  # whether it was ended for what it printed
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def join(self) -> str:
        """Wait for the end of the output, though not for ever; return the last line's reason."""
        self._thread.join(STOP_SECONDS)
        return self._last

    def _copy(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while raw := stream.readline(LINE_BYTES):
                line = raw.decode("utf-8", "replace").rstrip()
                self._last = self._child.reason(line) or self._last
                self._sink.emit(logging.LogRecord("", logging.INFO, "", 0, line, None, None))
                if not self._child.heard(line):
                    self.stopped = True
                    _kill(self._process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    signal_group(process, KILL)


def _bounded_log(path: Path) -> logging.handlers.RotatingFileHandler:
    """Return a writer of lines to `path`, readable by us alone, cut off at LOG_BYTES."""
    path.touch(mode=0o600)
    return logging.handlers.RotatingFileHandler(
        path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"
    )
