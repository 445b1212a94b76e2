"""Logs that describe themselves, and what of them travels.

A run's part of `<stage>.log` opens and closes with one line of ours:

    [syncd] start pretrain.0001.7f3a attempt 1 at 2026-11-30T07:45:00Z: python -m trainer pretrain
    [syncd] end pretrain.0001.7f3a attempt 1 at 2026-11-30T07:46:00Z after 60.0 s: success (exit 0)
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from protocol.states import Result

_STAMP = "%Y-%m-%dT%H:%M:%SZ"
_LINE = re.compile(
    rb"\[syncd\] (?P<what>start|end) (?P<run>\S+) attempt (?P<attempt>\d+) at (?P<time>\S+)"
    rb"(?: after (?P<seconds>[0-9]{1,12}\.[0-9]) s)?: (?P<rest>.*)\Z"
)
_END = re.compile(r"(?P<result>\w+)(?: \((?P<cause>.*)\))?\Z")


def stamp(seconds: float) -> str:
    """Return a time, in seconds since the epoch, as UTC to the second.

    One that no calendar holds (a broken clock at the other end) is shown as `?`.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(_STAMP)
    except (OverflowError, OSError, ValueError):
        return "?"


def one_line(text: str) -> str:
    """Return `text` with line breaks and other control characters written as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


@dataclass(frozen=True, kw_only=True)
class LogStart:
    """The line that opens an attempt's part of a log."""

    run_id: str
    attempt: int
    time: float
    command: str

    def line(self) -> bytes:
        at = f"{self.run_id} attempt {self.attempt} at {stamp(self.time)}"
        return f"[syncd] start {at}: {one_line(self.command)}\n".encode()


@dataclass(frozen=True, kw_only=True)
class LogEnd:
    """The line that closes an attempt's part of a log."""

    run_id: str
    attempt: int
    time: float
    seconds: float
    result: Result
    cause: str = ""

    def line(self) -> bytes:
        at = f"{self.run_id} attempt {self.attempt} at {stamp(self.time)}"
        cause = f" ({one_line(self.cause)})" if self.cause else ""
        return f"[syncd] end {at} after {self.seconds:.1f} s: {self.result}{cause}\n".encode()


def parse_log_line(line: bytes) -> LogStart | LogEnd | None:
    """Parse a line of a log; None when it is the stage's own output."""
    match = _LINE.match(line.rstrip(b"\r\n"))
    if not match:
        return None
    rest = match["rest"].decode("utf-8", "replace")
    try:
        time = datetime.strptime(match["time"].decode(), _STAMP).replace(tzinfo=UTC).timestamp()
        run_id, attempt = match["run"].decode(), int(match["attempt"])
        if match["what"] == b"start":
            return LogStart(run_id=run_id, attempt=attempt, time=time, command=rest)
        end = _END.match(rest)
        if end is None:
            return None
        return LogEnd(
            run_id=run_id,
            attempt=attempt,
            time=time,
            seconds=float(match["seconds"] or 0.0),
            result=Result(end["result"]),
            cause=end["cause"] or "",
        )
    except (ValueError, UnicodeDecodeError):
        return None


def drop_redraws(data: bytes) -> bytes:
    """Return terminal output without the states of a line that a carriage return drew over.

    `10%\\r20%\\r30%\\n` becomes `\\r30%\\n`: the first line keeps its last carriage return, because
    the data may go on where a line was left. A carriage return that ends the data, or precedes a
    line feed, draws over nothing yet and stays.
    """
    if b"\r" not in data:
        return data
    lines = [line[_redrawn(line) :] for line in io.BytesIO(data)]
    if _redrawn(data[: data.find(b"\n") + 1] or data) > 0:
        lines[0] = b"\r" + lines[0]
    return b"".join(lines)


def _redrawn(line: bytes) -> int:
    return line.rstrip(b"\r\n").rfind(b"\r") + 1
