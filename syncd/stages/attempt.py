"""One attempt of one run, from the daemon's side: all that is known of it is in its folder.

`syncd.stages.attempt_files` says what each file holds. Each is durable before the next step is
taken, and nothing is kept in the daemon's memory: a daemon killed anywhere calls the same
functions again. Nothing here waits for a stage. Linux only (/proc, a subreaper).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from protocol.errors import BusyError, DataError, ExitCode, RunFailedError
from protocol.publish import make_dirs, make_durable, publish_json, remove_leftovers
from syncd.platform import Identity, process_start
from syncd.stages.attempt_files import (
    EXIT,
    LOCK,
    SECRET_VARIABLES,
    SPEC,
    STAGE,
    STOP,
    SUPERVISOR,
    SUPERVISOR_LOG,
    AttemptSpec,
    StopRequest,
    read_file,
)
from syncd.stages.causes import ExitRecord, StopReason
from syncd.stages.orphans import remains

SPAWN_WAIT = 30.0


@dataclass(frozen=True)
class NeverStarted:
    """No supervisor has said that it is there: it was not spawned, or is only just starting."""


@dataclass(frozen=True)
class Running:
    """Its supervisor is alive."""

    supervisor: Identity


@dataclass(frozen=True)
class Orphaned:
    """Its supervisor is dead, and these processes of it are not: `spawn` one that ends them."""

    processes: tuple[Identity, ...]


@dataclass(frozen=True)
class Ended:
    """It is over, and nothing of it is left."""

    record: ExitRecord


@dataclass(frozen=True)
class Vanished:
    """All of it is dead and nobody recorded its end: killed at once, or the machine restarted.

    `started` says whether its command may have run. `spawn` records its end then, and starts the
    command otherwise.
    """

    started: bool


Observation: TypeAlias = NeverStarted | Running | Orphaned | Ended | Vanished


def was_started(seen: Observation) -> bool:
    """Whether the command of an attempt may have run, or may do so by itself."""
    return not isinstance(seen, NeverStarted) and not (
        isinstance(seen, Vanished) and not seen.started
    )


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    """Return the folder of a run's attempt; it need not exist."""
    return run_dir / f"attempt-{attempt}"


def prepare(run_dir: Path, spec: AttemptSpec) -> Path:
    """Make the folder of an attempt with its spec, durably, and return it.

    The spec of an attempt that is there already stays as it is. Raises OSError.
    """
    folder = attempt_dir(Path(os.path.abspath(run_dir)), spec.attempt)
    make_dirs(folder, mode=0o700)
    if (folder / SPEC).exists():
        make_durable(folder / SPEC)
    else:
        remove_leftovers(folder, of=SPEC)  # of a daemon that was killed here
        publish_json(folder / SPEC, spec.to_json(), mode=0o600)
    return folder


def spawn(folder: Path, *, wait: float = SPAWN_WAIT) -> Observation:
    """Start the supervisor of a prepared attempt; return how the attempt is once that is known.

    Safe to call in any state: an attempt that runs or has ended is left alone, and of two
    supervisors only one gets the run's lock. The supervisor of an orphan ends what is left of it
    and records its end; nobody waits for that here. After `wait` seconds in which the new
    supervisor neither reported nor ended, the attempt is returned as it is then.

    Raises BusyError when an earlier attempt of the run is still alive, RunFailedError when the
    supervisor failed (`supervisor.log` has its words), OSError when it could not be started.
    """
    now = observe(folder)
    if isinstance(now, Running | Ended):
        return now
    pid = _spawn_detached(folder)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        exit_code = _exit_code(pid)
        now = observe(folder)
        if exit_code is None and isinstance(now, Running) and now.supervisor.pid == pid:
            break
        if exit_code is not None:
            if exit_code != 0 and not isinstance(now, Running | Ended):
                _raise_why(folder, exit_code)
            break
        time.sleep(0.005)
    return now


def _spawn_detached(folder: Path) -> int:
    """Start the supervisor in a session of its own, so that no interrupt of ours reaches it."""
    # -P: the current folder must not come onto sys.path, where it could shadow a module.
    argv = [sys.executable, "-P", "-m", "syncd.stages.supervisor", str(folder)]
    log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        argv[0],
        argv,
        {k: v for k, v in os.environ.items() if k not in SECRET_VARIABLES},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(folder / SUPERVISOR_LOG), log, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        # Whoever started the daemon may have ignored some: a shell's `&`, nohup, a notebook.
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
    )


def _exit_code(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # `observe` reaped it: it had reported, so it did not fail
    return os.waitstatus_to_exitcode(status) if ended else None


def _raise_why(folder: Path, exit_code: int) -> None:
    what = f"start {folder.name} of run {folder.parent.name}"
    if exit_code == ExitCode.BUSY:
        why = "an attempt of the run is still alive"
        raise BusyError(what, path=folder.parent / LOCK, why=why, hint="It must end first.")
    words = (folder / SUPERVISOR_LOG).read_text("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(words) if line.strip()), "it said nothing")
    why = f"the supervisor ended with exit code {exit_code}: {last}"
    raise RunFailedError(what, path=folder / SUPERVISOR_LOG, why=why)


def observe(folder: Path) -> Observation:
    """Return how an attempt is now, from its folder and the system's processes.

    A supervisor that this very process spawned, and that has ended, is reaped on the way.
    Raises DataError when one of the files was damaged.
    """
    try:
        supervisor = read_file(folder / SUPERVISOR, Identity)
    except DataError:
        if (record := read_file(folder / EXIT, ExitRecord)) is not None:
            return Ended(record)  # which it wrote whole, whoever it was
        raise
    if supervisor is not None and supervisor.alive():
        return Running(supervisor)
    # Read after looking for the supervisor: it writes the record before it ends, so one that was
    # seen dead has either written it by now or never will.
    record = read_file(folder / EXIT, ExitRecord)
    if supervisor is not None:
        _reap(supervisor)
    if record is not None:
        return Ended(record)
    if supervisor is None:
        return NeverStarted()
    left = remains(folder)
    if left:
        return Orphaned(tuple(left))
    return Vanished(started=(folder / STAGE).exists())


def _reap(supervisor: Identity) -> None:
    # A zombie keeps its process id, so this cannot collect another child of ours.
    if process_start(supervisor.pid) == supervisor.start:
        with contextlib.suppress(ChildProcessError):  # not a child of this process
            os.waitpid(supervisor.pid, os.WNOHANG)


def request_stop(folder: Path, reason: StopReason) -> None:
    """Ask for the end of an attempt, durably; the first request on file stays.

    In any state: before the supervisor is spawned it keeps the stage from being started, and
    after the end it does nothing. It does not wait. Of an orphan, `spawn` a supervisor, which
    takes the request into account. Raises OSError.
    """
    if (folder / EXIT).exists():
        return
    if not (folder / STOP).exists():
        request = StopRequest(reason=reason, time=time.time())
        publish_json(folder / STOP, dataclasses.asdict(request), mode=0o600)
    supervisor = read_file(folder / SUPERVISOR, Identity)
    if supervisor is not None:
        supervisor.signal(signal.SIGTERM)
