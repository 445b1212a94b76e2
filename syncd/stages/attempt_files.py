"""The files of an attempt's folder: what they hold, and how they are read.

    <state>/runs/<run id>/
        lock                held by the supervisor and by the stage, for as long as either lives
        attempt-<k>/
            spec.json       AttemptSpec, by the daemon, before the supervisor is spawned
            supervisor.json Identity, by the supervisor, before it starts the stage; by one that
                            takes over from it, before it ends what is left
            gpu.json        GpuUse, by the supervisor, before it starts the stage
            stage.json      StageStart, by the supervisor, before the stage's program runs
            stop.json       StopRequest, by the daemon, at any time
            exit.json       ExitRecord, by the supervisor, when nothing of the stage is left
            supervisor.log  what the supervisor itself has to say: normally nothing

Each file is durable before the next step is taken. `stage.json` is what makes an attempt start its
command at most once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from protocol.errors import DataError, UsageError
from protocol.publish import fsync_dir, make_dirs
from protocol.schema import decode
from syncd.platform import Identity
from syncd.stages.causes import StopReason

DEFAULT_GRACE = 10.0

SPEC, SUPERVISOR, GPU, STAGE, STOP, EXIT = (
    f"{name}.json" for name in ("spec", "supervisor", "gpu", "stage", "stop", "exit")
)
SUPERVISOR_LOG = "supervisor.log"
LOCK = "lock"
LOCK_PATIENCE = 0.5
TAIL_BYTES = 16 * 1024
# Which no stage is told: the key, and a remote whose URL holds a password.
SECRET_VARIABLES = ("SYNCD_KEY", "SYNCD_REMOTE")

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
    gpu: float = 0.0
    fence: str = ""
    cut_off: str = ""


@dataclass(frozen=True, kw_only=True)
class AttemptSpec(_SpecFields):
    """What an attempt runs. `timeout` and `grace`, between SIGTERM and SIGKILL, are in seconds.

    `line` is the queue's; `command` a string for `/bin/sh -c` or the arguments of a program;
    `environ` is added to the daemon's environment; `cwd` and `log` are absolute paths. `gpu` is the
    share of the GPU that it takes. `fence` is an absolute path, or "": the attempt must not start,
    and ends, once there is a file. `cut_off` is what became of the attempt before, where its own
    part of the log has no end.

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
            ("fence", not self.fence or _is_path(self.fence), "an absolute path, or empty"),
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


def stop_requested(folder: Path) -> StopReason | None:
    """Return the reason of the stop request on file, or None when there is none.

    One that cannot be read is still a request.
    """
    try:
        request = read_file(folder / STOP, StopRequest)
    except DataError:
        return StopReason.STOPPED
    return request.reason if request else None


def stop_reason(folder: Path, fence: str) -> StopReason | None:
    """Return why an attempt must not go on, by request or by its fence; None when it may."""
    reason = stop_requested(folder)
    if reason is None and fence and os.path.exists(fence):
        reason = StopReason.FENCED
    return reason


def fenced_by(fence: str) -> str:
    """Return who has taken over, by a fence's own word; "" where that cannot be read."""
    # That the file is there is what counts, not what it holds.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        told = json.loads(Path(fence).read_bytes()) if fence else {}
        if isinstance(told, dict) and isinstance(told.get("by"), str):
            return str(told["by"])
    return ""


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


def complain(text: str) -> None:
    """Say something in `supervisor.log`, which is the supervisor's standard error."""
    with contextlib.suppress(OSError):  # it is on a full disk, too
        os.write(2, f"{text}\n".encode())


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

    def say(self, line: bytes) -> None:
        """Append a line of ours; where that cannot be done, complain.

        The log is for a person: no end is kept from being recorded because of it.
        """
        try:
            self.line(line)
        except OSError as error:
            complain(f"write the log: {error}")

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
