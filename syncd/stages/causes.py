"""Why an attempt ended: the facts that can be gathered about its end, and what they amount to.

`judge` is the pure decision, `Facts` all that it looks at; the functions below it gather the facts
that only the system knows. A cause is one line for a person: "exit 3; last line: bad shape",
"out of memory on the GPU (exit 1): ...", "SIGSEGV", "timed out after 3600 s".
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from protocol.logs import LogEnd, drop_redraws, one_line
from protocol.states import Result

MAX_QUOTE = 200
_SHELL_CODES = {126: "command not executable", 127: "command not found"}
# Said by the programs themselves, torch, CPython, libstdc++ and libc, in the log's last lines.
# Compiled when an end is to be explained, not each time that a supervisor starts.
_CONFESSIONS = (
    (
        "out of memory on the GPU",
        r"CUDA out of memory|torch\.\S*OutOfMemoryError|CUDA error: out of memory",
    ),
    ("out of shared memory", r"(?i:insufficient shared memory|out of shared memory)"),
    (
        "out of memory",
        r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory"
        r"|DefaultCPUAllocator: (can't allocate|not enough) memory",
    ),
    ("disk full", r"No space left on device|Disk quota exceeded"),
)


class StopReason(StrEnum):
    """Why a stage was ended before it ended by itself."""

    STOPPED = "stopped"  # a stop: line
    TIMED_OUT = "timed_out"
    FENCED = "fenced"  # another worker has taken over
    TERMINATED = "terminated"  # somebody sent the supervisor a SIGTERM, with no request on file


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of an attempt's end.

    `exit_code` or `signal` are those of the stage's own process; neither is set when it was never
    started, or when nobody was there to see it end. `stop` is set when we ended it, and
    `had_to_kill` when SIGTERM did not do. `oom_kills` counts what the kernel killed for memory
    meanwhile in our control group, `machine_oom_kills` on the whole machine (None: unreadable).
    `full` names folders on file systems without space; `tail` is the end of the attempt's log;
    `fenced_by` is who has taken over; `gpu_held` what of the GPUs' memory was not given back.
    """

    exit_code: int | None = None
    signal: int | None = None
    spawn_error: str = ""
    stop: StopReason | None = None
    had_to_kill: bool = False
    started: bool = True
    rebooted: bool = False
    timeout: float | None = None
    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    full: tuple[str, ...] = ()
    tail: bytes = b""
    fenced_by: str = ""
    gpu_held: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether the machine ended it, by going down or being restarted, and not the stage."""
        restarted = not self.seen and self.rebooted and self.stop is None
        return restarted or self.stop is StopReason.TERMINATED

    @property
    def seen(self) -> bool:
        """Whether the end of the stage's own process was seen."""
        return self.exit_code is not None or self.signal is not None


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """How an attempt ended. Times are seconds since the epoch; `started` None: it never did.

    `interrupted`: by its machine, which is no fault of the stage and costs it no retry.
    """

    run_id: str
    attempt: int
    result: Result
    cause: str
    exit_code: int | None = None
    signal: int | None = None
    started: float | None = None
    ended: float
    interrupted: bool = False

    def log_end(self) -> LogEnd:
        """Return the line that closes the attempt's part of the log."""
        return LogEnd(
            run_id=self.run_id,
            attempt=self.attempt,
            time=self.ended,
            seconds=0.0 if self.started is None else max(self.ended - self.started, 0.0),
            result=self.result,
            cause=self.cause,
        )


def judge(facts: Facts) -> tuple[Result, str]:
    """Return how an attempt ended and why. Only exit code 0, unasked for, is success."""
    result, cause = _judge(facts)
    return result, f"{cause}; {facts.gpu_held}" if facts.gpu_held else cause


def _judge(facts: Facts) -> tuple[Result, str]:
    if facts.stop is not None:
        return _judge_stop(facts, facts.stop)
    if facts.spawn_error:
        return Result.FAILED_TO_SPAWN, _quote(facts.spawn_error)
    if not facts.seen:
        lost = "the machine was restarted" if facts.rebooted else "its supervisor died"
        return Result.KILLED, _with_last_line(lost, tail_lines(facts.tail))
    if facts.exit_code == 0:
        return Result.SUCCESS, "exit 0"
    killed_by_kernel = _sigkilled(facts) and bool(facts.oom_kills)
    by_signal = facts.signal is not None or killed_by_kernel
    return Result.KILLED if by_signal else Result.FAILED, _explain(facts)


def _judge_stop(facts: Facts, stop: StopReason) -> tuple[Result, str]:
    allowed = "" if facts.timeout is None else f" after {facts.timeout:g} s"
    result, cause = {
        StopReason.STOPPED: (Result.STOPPED, "stopped"),
        StopReason.TIMED_OUT: (Result.TIMED_OUT, f"timed out{allowed}"),
        StopReason.FENCED: (
            Result.STOPPED,
            f"fenced: {one_line(facts.fenced_by) or 'another worker'} has taken over",
        ),
        # Such a run is to be resumed, so this is no stop: it is how a machine shuts down.
        StopReason.TERMINATED: (Result.KILLED, "its supervisor was sent SIGTERM"),
    }[stop]
    if not facts.started:
        return result, f"{cause} before it started"
    if not facts.seen:
        return result, f"{cause}; its supervisor had died"
    return result, f"{cause}; it had to be killed" if facts.had_to_kill else cause


def _explain(facts: Facts) -> str:
    how = _how(facts)
    if _sigkilled(facts) and facts.oom_kills:
        return f"out of memory: the kernel killed it ({how})"
    if _sigkilled(facts) and facts.machine_oom_kills:
        return f"likely out of memory: the kernel killed something for memory meanwhile ({how})"
    lines = tail_lines(facts.tail)
    for line in reversed(lines):
        for label, pattern in _CONFESSIONS:
            if re.search(pattern, line):
                return f"{label} ({how}): {_quote(line)}"
    if facts.full:
        return f"disk full ({how}): no space left under {', '.join(facts.full)}"
    if facts.oom_kills:
        how += f"; the kernel killed {facts.oom_kills} for memory meanwhile"
    if facts.exit_code in _SHELL_CODES:
        how = f"{_SHELL_CODES[facts.exit_code]} ({how})"
    return _with_last_line(how, lines)


def _with_last_line(cause: str, lines: Sequence[str]) -> str:
    return f"{cause}; last line: {_quote(lines[-1])}" if lines else cause


def _how(facts: Facts) -> str:
    if facts.signal is not None:
        return signal_name(facts.signal)
    code = facts.exit_code
    if code is not None and code > 128:
        # The shells' convention (POSIX, "Exit Status for Commands").
        with contextlib.suppress(ValueError):
            return f"exit {code}, as after {signal.Signals(code - 128).name}"
    return f"exit {code}"


def _sigkilled(facts: Facts) -> bool:
    return facts.signal == signal.SIGKILL or facts.exit_code == 128 + signal.SIGKILL


def signal_name(number: int) -> str:
    """Return `SIGSEGV` for 11, and `signal 40` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail_lines(tail: bytes) -> list[str]:
    """Return the lines that a person would have seen, blank ones and those of ours left out."""
    text = drop_redraws(tail.replace(b"\r\n", b"\n")).decode("utf-8", "replace")
    lines = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith("[syncd] ")]


def newest_part(tail: bytes) -> bytes:
    """Return what of the end of a log was written since the newest attempt began."""
    at = tail.rfind(b"\n[syncd] start ") + 1
    return tail[at:]


def _quote(line: str) -> str:
    text = one_line(line)
    return text if len(text) <= MAX_QUOTE else f"{text[: MAX_QUOTE - 1]}…"


@dataclass(frozen=True)
class OomKills:
    """How many processes the kernel has killed for memory so far; None where it does not say."""

    group: int | None
    machine: int | None

    @classmethod
    def read(cls) -> OomKills:
        """Read the counters: our control group's (v2, else v1), and the machine's.

        `memory.events` (Linux, cgroup-v2.rst), `memory.oom_control` (cgroup-v1/memory.rst) and
        /proc/vmstat each have a line `oom_kill N`.
        """
        group = (
            _oom_kill_line(path) for path in _group_files(_read_text(Path("/proc/self/cgroup")))
        )
        return cls(
            next((count for count in group if count is not None), None),
            _oom_kill_line(Path("/proc/vmstat")),
        )

    def since(self, before: OomKills) -> OomKills:
        """Return how many were killed after `before` was read."""
        return OomKills(_rise(before.group, self.group), _rise(before.machine, self.machine))


def _rise(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(after - before, 0)


def _group_files(cgroup: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yield the files that may count our group's kills, given /proc/self/cgroup, best first.

    In a container the path is often the host's, and the group is mounted as the root.
    """
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield root / path.lstrip("/") / "memory.events"
            yield root / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
            yield root / "memory" / "memory.oom_control"


def _oom_kill_line(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", _read_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _read_text(path: Path) -> str:
    # A kernel without the file, or a sandbox that hides it: the fact is then not known.
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def full_folders(folders: Iterable[str]) -> tuple[str, ...]:
    """Return those of `folders` whose file system has no block, or no inode, left for us."""
    full = []
    for folder in folders:
        with contextlib.suppress(OSError):  # gone: then it is not what is full
            stat = os.statvfs(folder)
            # Kernel file systems say 0 of 0 blocks, and some others 0 of 0 inodes.
            no_block = stat.f_blocks > 0 and stat.f_bavail == 0
            no_inode = stat.f_files > 0 and stat.f_favail == 0
            if (no_block or no_inode) and not stat.f_flag & os.ST_RDONLY:
                full.append(folder)
    return tuple(dict.fromkeys(full))
