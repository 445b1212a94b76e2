"""One attempt of one run, from the daemon's side: all that is known of it is in its folder.

    <state>/runs/<run id>/
        lock                held by the supervisor and by the stage, for as long as either lives
        attempt-<k>/
            spec.json       AttemptSpec, by the daemon, before the supervisor is spawned
            supervisor.json Identity, by the supervisor, before it starts the stage
            stage.json      StageStart, by the supervisor, before the stage's program runs
            stop.json       StopRequest, by the daemon, at any time
            exit.json       ExitRecord, by the supervisor, when nothing of the stage is left
            supervisor.log  what the supervisor itself has to say: normally nothing

Each file is durable before the next step is taken, and nothing is kept in the daemon's memory: a
daemon killed anywhere calls the same functions again. `stage.json` is what makes an attempt start
its command at most once. Linux only (/proc, a subreaper).
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
from protocol.publish import make_dirs, publish_json
from syncd.platform import Identity, boot_id, process_start
from syncd.stages.attempt_files import (
    DEFAULT_GRACE,
    EXIT,
    LOCK,
    LOCK_PATIENCE,
    SPEC,
    STAGE,
    STOP,
    SUPERVISOR,
    SUPERVISOR_LOG,
    AttemptSpec,
    LogFile,
    StageStart,
    StopRequest,
    read_file,
    read_spec,
    take_lock,
)
from syncd.stages.causes import ExitRecord, Facts, StopReason, judge
from syncd.stages.process_tree import descendants, end_processes, marked

SPAWN_WAIT = 30.0
# In the environment of each process of an attempt, with the attempt's folder: it finds those that
# left the process tree while no supervisor was there to adopt them.
MARK = "SYNCD_SUPERVISED"
KEY_VARIABLE = "SYNCD_KEY"


@dataclass(frozen=True)
class NeverStarted:
    """No supervisor has said that it is there: it was not spawned, or is only just starting."""


@dataclass(frozen=True)
class Running:
    """Its supervisor is alive."""

    supervisor: Identity


@dataclass(frozen=True)
class Orphaned:
    """Its supervisor is dead, and these processes of it are not. For `kill_orphan`."""

    processes: tuple[Identity, ...]


@dataclass(frozen=True)
class Ended:
    """It is over, and nothing of it is left."""

    record: ExitRecord


@dataclass(frozen=True)
class Vanished:
    """All of it is dead and nobody recorded its end: killed at once, or the machine restarted.

    `started` says whether its command may have run. If it did not, the attempt can be spawned
    again; `kill_orphan` records its end in either case.
    """

    started: bool
    rebooted: bool


Observation: TypeAlias = NeverStarted | Running | Orphaned | Ended | Vanished


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    """Return the folder of a run's attempt; it need not exist."""
    return run_dir / f"attempt-{attempt}"


def prepare(run_dir: Path, spec: AttemptSpec) -> Path:
    """Make the folder of an attempt with its spec, durably, and return it.

    The spec of an attempt that is there already stays as it is. Raises OSError.
    """
    folder = attempt_dir(Path(os.path.abspath(run_dir)), spec.attempt)
    make_dirs(folder, mode=0o700)
    if not (folder / SPEC).exists():
        publish_json(folder / SPEC, spec.to_json(), mode=0o600)
    return folder


def spawn(folder: Path, *, wait: float = SPAWN_WAIT) -> Observation:
    """Start the supervisor of a prepared attempt; return how the attempt is once that is known.

    Safe to call in any state: an attempt that runs, is orphaned or has ended is left alone, and
    of two supervisors only one gets the run's lock. After `wait` seconds in which the new
    supervisor neither reported nor ended, the attempt is returned as it is then.

    Raises BusyError when an earlier attempt of the run is still alive, RunFailedError when the
    supervisor failed (`supervisor.log` has its words), OSError when it could not be started.
    """
    now = observe(folder)
    if isinstance(now, Running | Orphaned | Ended):
        return now
    pid = _spawn_detached(folder)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        exit_code = _exit_code(pid)
        now = observe(folder)
        if exit_code is None and isinstance(now, Running) and now.supervisor.pid == pid:
            break
        if exit_code is not None:
            if exit_code != 0 and isinstance(now, NeverStarted | Vanished):
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
        {k: v for k, v in os.environ.items() if k != KEY_VARIABLE},
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
    supervisor = read_file(folder / SUPERVISOR, Identity)
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
    return Vanished(started=(folder / STAGE).exists(), rebooted=supervisor.boot != boot_id())


def _reap(supervisor: Identity) -> None:
    # A zombie keeps its process id, so this cannot collect another child of ours.
    if process_start(supervisor.pid) == supervisor.start:
        with contextlib.suppress(ChildProcessError):  # not a child of this process
            os.waitpid(supervisor.pid, os.WNOHANG)


def request_stop(folder: Path, reason: StopReason) -> None:
    """Ask for the end of an attempt, durably; the first request on file stays.

    In any state: before the supervisor is spawned it keeps the stage from being started, and
    after the end it does nothing. It does not wait. An orphan is for `kill_orphan`, which takes
    the request into account. Raises OSError.
    """
    if (folder / EXIT).exists():
        return
    if not (folder / STOP).exists():
        request = StopRequest(reason=reason, time=time.time())
        publish_json(folder / STOP, dataclasses.asdict(request), mode=0o600)
    supervisor = read_file(folder / SUPERVISOR, Identity)
    if supervisor is not None:
        supervisor.signal(signal.SIGTERM)


def stop_requested(folder: Path) -> StopReason | None:
    """Return the reason of the stop request on file, or None when there is none.

    One that cannot be read is still a request.
    """
    try:
        request = read_file(folder / STOP, StopRequest)
    except DataError:
        return StopReason.STOPPED
    return request.reason if request else None


def kill_orphan(folder: Path, grace: float = DEFAULT_GRACE) -> ExitRecord:
    """End what an attempt without a supervisor left alive, record its end, and return the record.

    Blocks for up to `grace` seconds between SIGTERM and SIGKILL. An attempt that has ended is
    left alone, and one of which nothing is alive is just recorded.

    Raises BusyError when the supervisor is alive, or when a process survives SIGKILL; OSError.
    """
    what = f"end what is left of {folder.name} of run {folder.parent.name}"
    now = observe(folder)
    if isinstance(now, Ended):
        return now.record
    if isinstance(now, Running):
        why = f"its supervisor, process {now.supervisor.pid}, is alive"
        raise BusyError(what, path=folder, why=why, hint="Ask it to stop instead.")
    had_to_kill = end_processes(lambda: remains(folder) or None, grace, time.sleep)
    lock = take_lock(folder.parent / LOCK, patience=LOCK_PATIENCE)
    if lock is None:
        raise BusyError(what, path=folder.parent / LOCK, why="another process holds the lock")
    try:
        done = read_file(folder / EXIT, ExitRecord)
        return done or record_unseen(folder, had_to_kill=had_to_kill)
    finally:
        os.close(lock)


def record_unseen(folder: Path, *, had_to_kill: bool = False) -> ExitRecord:
    """Record the end of an attempt whose supervisor did not; the caller holds the run's lock."""
    supervisor = read_file(folder / SUPERVISOR, Identity)
    facts = Facts(
        started=(folder / STAGE).exists(),
        rebooted=supervisor is not None and supervisor.boot != boot_id(),
        stop=stop_requested(folder),
        had_to_kill=had_to_kill,
    )
    record = exit_record(folder, facts)
    # The record counts, not the log: a spec or a log that cannot be used does not keep it away.
    with (
        contextlib.suppress(OSError, DataError),
        contextlib.closing(LogFile(Path(read_spec(folder).log))) as log,
    ):
        log.line(record.log_end().line())
    publish_json(folder / EXIT, dataclasses.asdict(record), mode=0o600)
    return record


def exit_record(folder: Path, facts: Facts) -> ExitRecord:
    """Return the record of an attempt that ends now, judged from `facts`."""
    result, cause = judge(facts)
    start = read_file(folder / STAGE, StageStart)
    return ExitRecord(
        run_id=folder.parent.name,
        attempt=int(folder.name.rpartition("-")[2]),
        result=result,
        cause=cause,
        exit_code=facts.exit_code,
        signal=facts.signal,
        started=start.time if start else None,
        ended=time.time(),
    )


def remains(folder: Path) -> list[Identity]:
    """Return the living processes of an attempt, found without its supervisor's help.

    They are the stage's own process, each one whose environment carries the attempt's mark, and
    all that descend from these. One that did away with both its parents and its environment
    is not found.
    """
    start = read_file(folder / STAGE, StageStart)
    roots = [start.identity] if start and start.identity.alive() else []
    roots += marked(f"{MARK}={os.path.abspath(folder)}".encode())
    return list(dict.fromkeys([*roots, *descendants(roots)]))
