"""`status.txt`: what is running now and how it is, for a person; and the model behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.logs import one_line, stamp
from protocol.progress import Progress
from protocol.queue import readable
from protocol.states import Result

BAR_WIDTH = 24
GONE_AFTER_SECONDS = 90.0
GONE_AFTER_HEARTBEATS = 3
# What waits is told from so much or so long on: a line or two are always on their way.
TOLD_AFTER_SECONDS = 2.0
TOLD_FROM_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class RunningLine:
    """A run that is alive. Times are seconds since the epoch.

    `checkpoint` is its newest checkpoint that outlives the machine, `at_risk_since` from when on
    its work would be lost with it; null where that is not told.
    """

    run_id: str
    stage: str
    attempt: int
    started: float
    progress: Progress | None = None
    last_line: str = ""
    checkpoint: str = ""
    at_risk_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class WaitingLine:
    """A command that waits, and for what."""

    number: int
    line: str
    why: str


@dataclass(frozen=True, kw_only=True)
class EndedLine:
    """A command that ended."""

    number: int
    line: str
    result: Result
    cause: str
    ended: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """One worker at one moment: also its heartbeat. Sizes are bytes.

    The next one comes within `heartbeat` seconds, if nothing happens before.
    """

    time: float
    worker: str
    host: str
    sealed: bool
    running: tuple[RunningLine, ...] = ()
    waiting: tuple[WaitingLine, ...] = ()
    ended: tuple[EndedLine, ...] = ()
    unsent_bytes: int = 0
    unsent_since: float | None = None
    disk_free: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    leaving: str = ""
    heartbeat: float = 0.0


def render_status(status: Status, *, now: float, ago: bool = False) -> str:
    """Return `status.txt`. `now` is the reader's clock, which says how old the heartbeat is; it is
    told of any, if `ago`, which is no use in a file that is read later."""
    age = max(now - status.time, 0.0)
    lines = [f"worker {status.worker} on {status.host}, as of {stamp(status.time)}"]
    if ago and age >= TOLD_AFTER_SECONDS:
        lines[0] += f", {duration(age)} ago"
    if status.leaving:
        lines.append(f"The worker has left: {status.leaving}")
    elif age > gone_after(status):
        lines.append(f"NOT HEARD FOR {duration(age)}: the VM, or its connection, may be gone.")
    if not status.sealed:
        lines.append("NOT SEALED: whoever can write to the remote can run code on the VM.")
    lines += [f"PROBLEM: {p}" for p in status.problems]
    lines += ["", "running"]
    lines += [text for r in status.running for text in _running(r, status.time)] or ["  nothing"]
    if status.waiting:
        lines += ["", "waiting"]
        lines += [f"  {w.number:>4}  {shown(w.line):<28} {w.why}" for w in status.waiting]
    if status.ended:
        lines += ["", "ended"]
        lines += [
            f"  {e.number:>4}  {shown(e.line):<28} {e.result} at {stamp(e.ended)}"
            + (f": {e.cause}" if e.cause else "")
            for e in status.ended
        ]
    lines += ["", f"disk free {size(status.disk_free)}"]
    lines += [f"{name} {value}" for name, value in status.machine.items()]
    lines += [waits] if (waits := render_unsent(status)) else []
    return "".join(f"{one_line(line)}\n" for line in lines)


def render_unsent(status: Status) -> str:
    """Return what waits to be sent, "" when it is no more than is always on its way."""
    if not status.unsent_bytes or status.unsent_since is None:
        return ""
    waited = status.time - status.unsent_since
    if waited < TOLD_AFTER_SECONDS and status.unsent_bytes < TOLD_FROM_BYTES:
        return ""
    return f"to be sent {size(status.unsent_bytes)}, waiting for {duration(waited)}"


def gone_after(status: Status) -> float:
    """For how many seconds a worker may be silent before it may be gone."""
    return max(GONE_AFTER_SECONDS, GONE_AFTER_HEARTBEATS * status.heartbeat)


def _running(run: RunningLine, now: float) -> list[str]:
    again = f", attempt {run.attempt}" if run.attempt > 1 else ""
    lines = [f"  {run.run_id}  for {duration(now - run.started)}{again}"]
    if run.progress:
        lines.append(f"        {render_progress(run.progress)}")
    if risk := render_risk(run, now):
        lines.append(f"        {risk}")
    if run.last_line:
        lines.append(f"        {one_line(run.last_line)[:160]}")
    return lines


def render_risk(run: RunningLine, now: float) -> str:
    """Return what of a run would be lost with its machine; "" where that is not told."""
    if run.at_risk_since is None:
        return ""
    safe = f"safe up to {run.checkpoint}" if run.checkpoint else "no safe checkpoint yet"
    return one_line(f"{safe}; {duration(now - run.at_risk_since)} of work at risk")


def render_progress(progress: Progress, *, bar: bool = True) -> str:
    """Return progress in one line: a bar, if it is wanted and can be drawn, counts and message."""
    step = f"{progress.step:g}"
    if progress.total:
        step += f"/{progress.total:g}"
    text = f"{step} {progress.unit}"
    if bar and progress.fraction is not None:
        full = round(progress.fraction * BAR_WIDTH)
        drawn = "#" * full + "-" * (BAR_WIDTH - full)
        text = f"[{drawn}] {progress.fraction:4.0%}  {text}"
    return one_line(f"{text}  {progress.message}" if progress.message else text)


def shown(line: str) -> str:
    """Return a queue line short enough to show."""
    text = readable(line)
    return text if len(text) <= 28 else text[:25] + "..."


def duration(seconds: float) -> str:
    """Return a duration as a person says it: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    whole = int(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Return a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
