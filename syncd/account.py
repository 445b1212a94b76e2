"""What became of one run, in one place: every attempt, its end and its last words.

Put together from what this end has: the journal, the log, and the worker's last status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import DataError
from protocol.journal import JournalRecord
from protocol.logs import LogEnd, LogStart, drop_redraws, one_line, parse_log_line
from protocol.paths import Layout
from protocol.states import Result, State
from syncd.holes import data_from
from syncd.log_parts import rotated
from syncd.view import CommandView, read_commands, read_records, read_status

LAST_LINES = 8
MAX_LINE_BYTES = 64 * 1024
LINE_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt. `ended` and `result` are None, and `cause` is empty, while no end is known.

    Times are seconds since the epoch, by the worker's clock.
    """

    attempt: int
    worker: str
    started: float
    ended: float | None
    result: Result | None
    cause: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Account:
    """A command with all its attempts; `waits_for` is empty for one that runs or has ended."""

    command: CommandView
    attempts: tuple[AttemptView, ...]
    waits_for: str


def read_account(layout: Layout, name: str) -> Account | None:
    """Return what became of a command, named by its run id or its number; None for no such one.

    A stage's name stands for the newest command that runs it. Raises DataError when what this end
    keeps cannot be read.
    """
    commands = read_commands(layout)
    asked = [v for v in commands if name in (v.run_id or None, str(v.number))]
    asked += [v for v in reversed(commands) if v.line == f"run:{name}"]
    if not asked:
        return None
    command = asked[0]
    records = [r for r in read_records(layout) if r.number == command.number]
    parts = _read_log(layout.run_log(command.run_id), command.run_id) if command.run_id else {}
    return Account(
        command=command,
        attempts=tuple(_attempts(records, parts)),
        waits_for=_waits_for(layout, command),
    )


def _waits_for(layout: Layout, command: CommandView) -> str:
    if command.state is State.ENDED:
        return ""
    status = read_status(layout)
    waiting = status.waiting if status else ()
    told = next((w.why for w in waiting if w.number == command.number), "")
    return told or ("" if command.state is State.STARTED else "a worker to take it up")


@dataclass
class _LogPart:
    """An attempt's part of a log: its last lines, and the line that closes it."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    end: LogEnd | None = None


def _attempts(records: list[JournalRecord], parts: dict[int, _LogPart]) -> Iterator[AttemptView]:
    """Yield the attempts that were started. The log's word of an end goes before the journal's,
    which tells of an attempt that was tried again when the next one starts, and of the last one
    with what became of the run.
    """
    starts = [record for record in records if record.state is State.STARTED]
    for place, start in enumerate(starts):
        part = parts.get(start.attempt, _LogPart())
        again = starts[place + 1].cause if place + 1 < len(starts) else ""
        over = next((r for r in records if r.result and _same(r, start)), None)
        told = again.removeprefix(f"attempt {start.attempt}: ") or (over.cause if over else "")
        end = part.end
        yield AttemptView(
            attempt=start.attempt,
            worker=start.worker,
            started=start.time,
            ended=end.time if end else over.time if over else None,
            result=end.result if end else over.result if over else None,
            cause=end.cause if end else told,
            last_lines=tuple(part.lines),
        )


def _same(one: JournalRecord, other: JournalRecord) -> bool:
    return (one.attempt, one.worker) == (other.attempt, other.worker)


def _read_log(path: Path, run_id: str) -> dict[int, _LogPart]:
    """Return the parts of a run's attempts that are in a log, by attempt. Raises DataError."""
    found: dict[int, _LogPart] = {}
    part: _LogPart | None = None
    for line in _lines([rotated(path), path]):
        ours = parse_log_line(line) if line.startswith(b"[syncd] ") else None
        if isinstance(ours, LogStart):
            part = _LogPart() if ours.run_id == run_id else None
            if part is not None:
                found[ours.attempt] = part
        elif part is not None and isinstance(ours, LogEnd):
            part.end = ours
        elif part is not None:
            # What a budget has freed at the beginning of a log reads as NUL bytes.
            shown = drop_redraws(line.replace(b"\0", b""))
            text = one_line(shown.decode("utf-8", "replace").strip())
            if text:
                part.lines.append(text[:LINE_SHOWN])
    return found


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        try:
            with open(path, "rb") as file:
                file.seek(data_from(file.fileno(), 0))
                while line := file.readline(MAX_LINE_BYTES):
                    yield line
        except FileNotFoundError:
            continue
        except OSError as error:
            why = error.strerror or str(error)
            raise DataError("read the log", path=path, why=why) from error
