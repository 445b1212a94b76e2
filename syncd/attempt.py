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
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from protocol.errors import BusyError, DataError, ExitCode, RunFailedError, UsageError
from protocol.publish import fsync_dir, make_dirs, publish_json
from protocol.schema import decode
from syncd.causes import ExitRecord, Facts, StopReason, judge
from syncd.platform import Identity, boot_id, process_start

DEFAULT_GRACE = 10.0
SPAWN_WAIT = 30.0
# How long a process may take to die of SIGKILL before it is reported: one in an uninterruptible
# call (a dead network or FUSE mount, a GPU driver) does not.
KILL_PATIENCE = 10.0
# In the environment of each process of an attempt, with the attempt's folder: it finds those that
# left the process tree while no supervisor was there to adopt them.
MARK = "SYNCD_SUPERVISED"
KEY_VARIABLE = "SYNCD_KEY"

SPEC, SUPERVISOR, STAGE, STOP, EXIT = (
    f"{name}.json" for name in ("spec", "supervisor", "stage", "stop", "exit")
)
SUPERVISOR_LOG = "supervisor.log"
LOCK = "lock"
LOCK_PATIENCE = 0.5

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _SpecFields:
    run_id: str
    stage: str
    attempt: int
    line: str
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: str
    log: str
    timeout: float | None = None
    grace: float = DEFAULT_GRACE


@dataclass(frozen=True, kw_only=True)
class AttemptSpec(_SpecFields):
    """What an attempt runs. `timeout` and `grace`, between SIGTERM and SIGKILL, are in seconds.

    `line` is the queue's; `command` a string for `/bin/sh -c` or the arguments of a program;
    `environ` is added to the daemon's environment; `cwd` and `log` are absolute paths.

    Raises UsageError when a field has a value that no attempt could run with.
    """

    command: str | tuple[str, ...]

    def __post_init__(self) -> None:
        given = self.environ
        for name, good, want in (
            ("attempt", self.attempt >= 1, "1 or more"),
            ("command", bool(self.argv[0]), "a program"),
            ("command", not any("\0" in word for word in self.argv), "without NUL characters"),
            ("environ", all(_is_variable(k, v) for k, v in given.items()), "names and values"),
            ("cwd", _is_path(self.cwd), "an absolute path"),
            ("log", _is_path(self.log), "an absolute path"),
            ("timeout", self.timeout is None or self.timeout > 0, "seconds above 0, or null"),
            ("grace", self.grace >= 0, "seconds, 0 or more"),
        ):
            if not good:
                raise UsageError(
                    f"run {self.run_id}, attempt {self.attempt}",
                    why=f"{name} is {getattr(self, name)!r}, and must be {want}",
                )

    @property
    def argv(self) -> tuple[str, ...]:
        """The program and its arguments."""
        if isinstance(self.command, str):
            return ("/bin/sh", "-c", self.command) if self.command.strip() else ("",)
        return self.command or ("",)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> AttemptSpec:
        """Read what `to_json` wrote. Raises ValueError."""
        fields = decode(_SpecFields, value)
        command = value.get("command")
        if isinstance(command, list) and all(isinstance(word, str) for word in command):
            command = tuple(command)
        elif not isinstance(command, str):
            raise ValueError("AttemptSpec.command is neither a string nor a list of strings")
        try:
            return cls(**vars(fields), command=command)
        except UsageError as error:
            raise ValueError(str(error)) from error


def _is_variable(name: str, value: str) -> bool:
    return bool(name) and "=" not in name and "\0" not in name + value


def _is_path(path: str) -> bool:
    return os.path.isabs(path) and "\0" not in path


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """The stage's own process, and when it was started (seconds since the epoch)."""

    identity: Identity
    time: float


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to end an attempt, and when it was made (seconds since the epoch)."""

    reason: StopReason
    time: float


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
    argv = [sys.executable, "-P", "-m", "syncd.supervisor", str(folder)]
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
        setsigdef=(signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM),
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


def read_file(path: Path, cls: type[T]) -> T | None:
    """Read one of an attempt's files; None when it is not there. Raises DataError."""
    try:
        return decode(cls, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("read an attempt's file", path=path, why=str(error)) from error


def read_spec(folder: Path) -> AttemptSpec:
    """Read an attempt's spec. Raises DataError."""
    path = folder / SPEC
    try:
        return AttemptSpec.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("read an attempt's spec", path=path, why=str(error)) from error


def take_lock(path: Path, *, patience: float) -> int | None:
    """Take the run's lock and return its descriptor, which holds it wherever it is inherited.

    None when another process has held it for `patience` seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.01)


class LogFile:
    """A stage's log, opened for appending; the stage writes to this very descriptor.

    Raises OSError: when it cannot be opened, and from each method.
    """

    def __init__(self, path: Path) -> None:
        make_dirs(path.parent)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        fsync_dir(path.parent)

    def line(self, line: bytes) -> None:
        """Append a line of ours, on a line of its own whatever the stage left unfinished."""
        size = self.size()
        whole = size == 0 or os.pread(self.fd, 1, size - 1) == b"\n"
        view = memoryview(line if whole else b"\n" + line)
        while view:
            view = view[os.write(self.fd, view) :]

    def size(self) -> int:
        """Return how many bytes it has."""
        return os.fstat(self.fd).st_size

    def tail(self, limit: int, since: int) -> bytes:
        """Return up to `limit` bytes from the end, of those after the first `since`."""
        end = self.size()
        if since > end:  # somebody has cut it meanwhile
            since = 0
        at = max(since, end - limit)
        return os.pread(self.fd, end - at, at)

    def close(self) -> None:
        """Make it durable and close it."""
        try:
            os.fsync(self.fd)
        finally:
            os.close(self.fd)


def remains(folder: Path) -> list[Identity]:
    """Return the living processes of an attempt, found without its supervisor's help.

    They are the stage's own process, each one whose environment carries the attempt's mark, and
    all that descend from these. One that did away with both its parents and its environment
    is not found.
    """
    start = read_file(folder / STAGE, StageStart)
    roots = [start.identity] if start and start.identity.alive() else []
    roots += _marked(f"{MARK}={os.path.abspath(folder)}".encode())
    return list(dict.fromkeys([*roots, *descendants(roots)]))


def _marked(variable: bytes) -> Iterator[Identity]:
    for pid in _process_ids():
        # The identity first: should the process id change hands after it, it is of a dead process.
        process = Identity.of(pid)
        with contextlib.suppress(OSError):  # gone, or another user's
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if variable in environ and process is not None and process.alive():
                yield process


def descendants(roots: Iterable[Identity]) -> list[Identity]:
    """Return the living descendants of `roots`, those in sessions of their own included.

    One that is started meanwhile may be missed: ask until none is left.
    """
    children: dict[int, list[int]] = {}
    for pid in _process_ids():
        children.setdefault(_parent(pid), []).append(pid)
    found: list[Identity] = []
    frontier = list(roots)
    while frontier:
        parent = frontier.pop()
        for pid in children.get(parent.pid, ()):
            child = Identity.of(pid)
            # In this order, so that no change of hands of either process id goes unnoticed.
            if child and child.alive() and _parent(pid) == parent.pid and parent.alive():
                found.append(child)
                frontier.append(child)
    return found


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int:
    """Return the process id of the parent (proc_pid_stat(5), field 4), 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 1 :].split()[1])


def end_processes(
    find: Callable[[], Sequence[Identity] | None], grace: float, pause: Callable[[float], object]
) -> bool:
    """End all that `find` finds, until it returns None: SIGTERM, after `grace` seconds SIGKILL.

    Each process is asked once with each signal, those that appear meanwhile too. `pause` waits
    for up to so many seconds. Returns whether a SIGKILL was needed.

    Raises BusyError when some survive SIGKILL for 10 s, as in a call that cannot be interrupted.
    """
    left: Sequence[Identity] | None = ()
    for sig, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_PATIENCE)):
        deadline, step = time.monotonic() + patience, 0.01
        asked: set[Identity] = set()
        while (left := find()) is not None:
            for process in left:
                if process not in asked:
                    _send(process, sig)
            asked.update(left)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            pause(min(step, remaining))
            step = min(step * 2, 0.5)
        else:
            return sig is signal.SIGKILL and bool(asked)
    pids = ", ".join(str(process.pid) for process in left or ())
    raise BusyError("end a stage's processes", why=f"alive after SIGKILL: {pids or 'unknown'}")


def _send(process: Identity, sig: signal.Signals) -> None:
    with contextlib.suppress(PermissionError):  # another user's; it is named if it stays
        process.signal(sig)
        if sig is signal.SIGTERM:
            process.signal(signal.SIGCONT)  # a suspended process acts on SIGTERM only when woken
