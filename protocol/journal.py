"""`journal.jsonl`: what happened to every command, one JSON object a line, append-only.

A record is durable before the next thing is done: `claimed` before a run is prepared, `started`
before its process is spawned, `ended` after its exit record is on the disk. The newest record of
a command is its state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from protocol.queue import readable
from protocol.schema import decode, dumps, loads
from protocol.states import Result, State, is_legal


@dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """One step in a command's life.

    `number` is the command's number, `line` its queue line, `run_id` the run it stands for (of a
    `run:` or `sh:`), `worker` the writer that recorded it, `attempt` counts from 1, `snapshot`
    names the payload. `result`, `exit_code` and `signal` belong to `ended`; so does `cause`, which
    in a `started` says why the attempt before it ended. Times are
    seconds since the epoch, by the worker's clock; order is the file's, never the clock's.
    """

    number: int
    line: str
    state: State
    time: float
    worker: str
    run_id: str = ""
    attempt: int = 0
    snapshot: int = 0
    result: Result | None = None
    cause: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: float | None = None

    def __post_init__(self) -> None:
        if (self.state is State.ENDED) != (self.result is not None):
            raise ValueError("a record has a result when, and only when, it is ended")
        if self.number < 1:
            raise ValueError("commands count from 1")

    @property
    def key(self) -> tuple[int, State, int, str]:
        """What makes two records the same one, however often it arrives."""
        return (self.number, self.state, self.attempt, self.worker)

    def told(self) -> str:
        """The record as one line for a person."""
        text = f"{readable(self.line)[:60]} {self.state}"
        if self.state is State.STARTED and self.attempt > 1:
            text += f", attempt {self.attempt}"
        if self.result is not None:
            return f"{text} as {self.result}: {self.cause}".rstrip(": ")
        return f"{text} ({self.cause})" if self.cause else text

    def encode(self) -> bytes:
        """Return the record as one line; fields at their defaults are left out."""
        defaults = {field.name: field.default for field in fields(self)}
        value = {k: v for k, v in asdict(self).items() if v != defaults[k]}
        return dumps(value, separators=(", ", ": ")) + b"\n"


def parse_record(line: bytes) -> JournalRecord:
    """Parse one line. Raises ValueError with the reason."""
    return decode(JournalRecord, loads(line))


@dataclass(frozen=True, kw_only=True)
class JournalProblem:
    """A line of a journal that is not a record, or not a legal next step."""

    line_number: int
    why: str


def parse_journal(data: bytes) -> tuple[list[JournalRecord], list[JournalProblem]]:
    """Parse a whole journal; a torn last line and lines that are no records become problems."""
    records: list[JournalRecord] = []
    problems: list[JournalProblem] = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut short")
            records.append(parse_record(line))
        except ValueError as error:
            problems.append(JournalProblem(line_number=number, why=str(error)))
    return records, problems


def advance(newest: dict[int, JournalRecord], record: JournalRecord) -> bool:
    """Make `record` its command's newest if it counts; return whether it does.

    Of one worker it must be a legal next step. A newer worker's record goes before whatever an
    older one has recorded, and an older one's counts for nothing then: the newer one has not read
    it. (Workers compare as text: `w-<epoch>-<nonce>`.)
    """
    before = newest.get(record.number)
    legal = is_legal(before.state if before else State.QUEUED, record.state)
    if before is not None and before.worker != record.worker:
        legal = record.worker > before.worker
    if legal:
        newest[record.number] = record
    return legal


def fold(records: Iterable[JournalRecord]) -> dict[int, JournalRecord]:
    """Return each command's newest record. Records that do not count are passed over."""
    newest: dict[int, JournalRecord] = {}
    for record in records:
        advance(newest, record)
    return newest
