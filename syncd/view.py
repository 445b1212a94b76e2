"""What one end knows, read without its daemon: for the commands that show and ask.

Everything here reads; only `append_commands` writes, and only `queue.txt`, as a person would.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.errors import ConfigError, DataError, UsageError
from protocol.files import BINARY
from protocol.journal import JournalRecord, fold, parse_journal
from protocol.messages import QueuedCommand
from protocol.names import canonical_stage, suggest
from protocol.paths import Layout
from protocol.publish import fsync_dir
from protocol.queue import MAX_LINE_BYTES, lines_of
from protocol.schema import decode, loads
from protocol.states import Result, State
from protocol.status import Status
from protocol.wire import Role, Writer
from syncd.delivery.payload import read_stages
from syncd.holes import data_from
from syncd.platform import is_locked
from syncd.unsent import Unsent

FOLLOW_SECONDS = 0.1


def find_folder(start: Path) -> Layout:
    """Return the shared folder that `start` is, or lies in. Raises ConfigError for none."""
    whole = start.resolve()
    if not whole.is_dir():
        raise ConfigError(
            "find the shared folder", path=whole, why="there is no such folder", hint=_INIT
        )
    for folder in (whole, *whole.parents):
        if (folder / ".syncd").is_dir() or (folder / "syncd.toml").is_file():
            return Layout(folder)
    raise ConfigError(
        "find the shared folder",
        path=whole,
        why="neither it nor a folder above has a syncd.toml",
        hint=_INIT,
    )


_INIT = "Run `syncd init` there, or give --folder."


@dataclass(frozen=True, kw_only=True)
class CommandView:
    """One command of the queue and how it is. `cause` says why it ended as it did.

    `time` is of its newest record, `started` of its first attempt.
    """

    number: int
    line: str
    run_id: str
    state: State
    result: Result | None
    cause: str
    worker: str
    attempt: int
    time: float | None
    started: float | None = None


def read_commands(layout: Layout) -> list[CommandView]:
    """Return every command that this end knows, in order. Raises DataError."""
    records = read_records(layout)
    newest, started = fold(records), dict[int, float]()
    for record in records:
        if record.state is State.STARTED:
            started.setdefault(record.number, record.time)
    views = [
        _view(message, newest.get(message.number), started.get(message.number))
        for message in _messages(layout)
    ]
    return sorted(views, key=lambda view: view.number)


def _view(
    message: QueuedCommand, record: JournalRecord | None, started: float | None
) -> CommandView:
    return CommandView(
        number=message.number,
        line=message.line,
        run_id=message.run_id,
        state=record.state if record else State.QUEUED,
        result=record.result if record else None,
        cause=record.cause if record else message.error,
        worker=record.worker if record else "",
        attempt=record.attempt if record else 0,
        time=record.time if record else None,
        started=started,
    )


def _messages(layout: Layout) -> list[QueuedCommand]:
    found = _query(layout, "SELECT message FROM commands ORDER BY number")
    return [decode(QueuedCommand, json.loads(text)) for text in found]


def _query(layout: Layout, sql: str) -> list[str]:
    """Return the only column of a query of the daemon's state; empty while there is none."""
    path = layout.private / "state.db"
    if not path.exists():
        return []
    try:
        # Another process writes: this one waits for its turn and never holds it.
        with contextlib.closing(sqlite3.connect(path, timeout=10.0)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if not version:  # it is being made
                return []
            rows = database.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise DataError("read the state", path=path, why=str(error)) from error
    return [row[0] for row in rows]


def read_role(layout: Layout) -> Role | None:
    """Return which end the daemon has been here, None when there was none. Raises DataError."""
    found = _query(layout, "SELECT value FROM meta WHERE key = 'writer'")
    writer = Writer.parse(json.loads(found[0])) if found else None
    return writer.role if writer else None


def read_records(layout: Layout) -> list[JournalRecord]:
    """Return the journal's records in order. A line that is being written is passed over."""
    try:
        records, _ = parse_journal(layout.journal.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError("read the journal", path=layout.journal, why=why) from error
    return records


def read_journal(layout: Layout) -> dict[int, JournalRecord]:
    """Return every command's newest record."""
    return fold(read_records(layout))


def read_status(layout: Layout) -> Status | None:
    """Return the worker's newest status that this end has, or None. Raises DataError."""
    path = layout.private / "status.json"
    try:
        return decode(Status, loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError("read the status", path=path, why=str(error)) from error


def read_age(layout: Layout) -> float | None:
    """Return for how many seconds nothing was heard of the worker; None at the worker's own end.

    By this machine's clock alone: the worker's may be wrong.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        came = loads((layout.private / "status.json").read_bytes()).get("came")
        return None if came is None else max(time.time() - float(came), 0.0)
    return None


def read_problems(layout: Layout) -> list[str]:
    """Return what the controller's daemon last said is wrong at its end. Raises DataError."""
    try:
        found = loads(layout.problems.read_bytes())
        if not isinstance(found, list):
            raise ValueError("not a list")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError("read the problems", path=layout.problems, why=str(error)) from error
    return [str(each) for each in found]


def read_unsent(layout: Layout) -> Unsent | None:
    """Return what waits at the controller to be sent, None for nothing. Raises DataError."""
    try:
        return decode(Unsent, loads(layout.unsent.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError("read what waits", path=layout.unsent, why=str(error)) from error


def is_watched(layout: Layout) -> bool | None:
    """Say whether a `syncd watch` runs on this end; None where the system does not tell."""
    return is_locked(layout.private / "lock")


def check_stage(layout: Layout, name: str) -> str:
    """Return the canonical name of a stage that serve/stages.toml defines. Raises ConfigError."""
    stage = canonical_stage(name)
    stages = read_stages(layout.serve)
    if stage not in stages:
        raise ConfigError(
            f"stage {name!r}",
            path=layout.serve / "stages.toml",
            why="it is not defined there",
            hint=suggest(stage, stages),
        )
    return stage


def append_commands(layout: Layout, lines: Sequence[str]) -> None:
    """Append lines to queue.txt in one write, after ending a last line that has no end.

    In UTF-8, or in the UTF-16 that an editor of Windows saved it in. Raises ConfigError when it
    cannot be written, UsageError for a line that no queue takes.
    """
    for line in lines:
        if len(line.encode("utf-8", "surrogatepass")) > MAX_LINE_BYTES:
            why = f"it would be longer than {MAX_LINE_BYTES} bytes"
            raise UsageError(
                "append to the queue", path=layout.queue, why=why, hint="Serve it as a file."
            )
    try:
        fd = os.open(layout.queue, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            encoding = _ENCODINGS.get(file.read(2), "utf-8")
            width = len("\n".encode(encoding))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - width, 0))
            unfinished = size > 0 and file.read(width).decode(encoding, "replace") not in "\r\n"
            view = memoryview((("\n" if unfinished else "") + lines_of(lines)).encode(encoding))
            while view:
                view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        fsync_dir(layout.queue.parent)
    except OSError as error:
        raise ConfigError(
            "append to the queue", path=layout.queue, why=error.strerror or str(error)
        ) from error


_ENCODINGS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def wait_for(layout: Layout, line: str, after: int) -> Iterator[CommandView]:
    """Yield the view of the first command above number `after` with this line, as it changes.

    Ends when the command has ended; blocks between changes.
    """
    last: CommandView | None = None
    while last is None or last.state is not State.ENDED:
        seen = _stamp(layout)
        found = [v for v in read_commands(layout) if v.number > after and v.line == line]
        if found and found[0] != last:
            last = found[0]
            yield last
        while last is None or last.state is not State.ENDED:
            time.sleep(FOLLOW_SECONDS)
            if _stamp(layout) != seen:
                break


def _stamp(layout: Layout) -> list[tuple[int, int] | None]:
    """What changes whenever the commands or the journal do."""
    state = layout.private / "state.db"
    found: list[tuple[int, int] | None] = []
    for path in (layout.journal, state, state.with_name("state.db-wal")):
        try:
            stat = path.stat()
            found.append((stat.st_size, stat.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return found


def follow(path: Path, *, lines: int | None) -> Iterator[bytes]:
    """Yield the end of a log and then what is appended, for ever; b"" between looks.

    A log that is rotated is read to its end, and the new one from its beginning.
    """
    file = _open_at(path, lines)
    try:
        while True:
            if file is None:
                file = _open_at(path, None)
            if file is not None:
                # Asked before the file is read to its end: what is added just before a rotation
                # is not missed.
                left = _has_left(file, path)
                at = min(file.tell(), os.fstat(file.fileno()).st_size)  # it may be cut
                file.seek(data_from(file.fileno(), at))
                while block := file.read(65536):
                    yield block
                if left:
                    file.close()
                    file = None
            yield b""
    finally:
        if file is not None:
            file.close()


def _has_left(file: IO[bytes], path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino != path.stat().st_ino
    except FileNotFoundError:
        return True


def check_log(layout: Layout, stage: str) -> Path:
    """Return where the log of a stage, or of `sh-<number>`, is or will be.

    Raises DataError when there is none and serve/stages.toml has no such stage.
    """
    number = stage.removeprefix("sh-")
    if stage.startswith("sh-") and number.isdecimal():
        return layout.shell_log(int(number))
    path = layout.log(stage)
    if not path.exists():
        # A worker's end has no stages of its own, and a file that is wrong tells nothing.
        with contextlib.suppress(ConfigError):
            stages, name = read_stages(layout.serve), canonical_stage(stage)
            if name not in stages:
                why = f"there is none, and serve/stages.toml defines no stage {name!r}"
                raise DataError("read the log", path=path, why=why, hint=suggest(name, stages))
    return path


def tail(path: Path, lines: int | None) -> bytes:
    """Return a log's last lines, all of them for None. Raises DataError when there is no log."""
    file = _open_at(path, lines)
    if file is None:
        raise DataError(
            "read the log",
            path=path,
            why="there is none yet",
            hint="`syncd status` shows whether it has started.",
        )
    with file:
        return file.read()


def _open_at(path: Path, lines: int | None) -> IO[bytes] | None:
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError("read the log", path=path, why=why) from error
    file.seek(data_from(file.fileno(), 0) if lines is None else _start_of(file, lines))
    return file


def _start_of(file: IO[bytes], lines: int) -> int:
    """Return where the last `lines` lines begin."""
    first, at, data = data_from(file.fileno(), 0), file.seek(0, os.SEEK_END), b""
    if lines == 0:
        return at
    while at > first and data.count(b"\n") <= lines:
        step = min(65536, at - first)
        at -= step
        file.seek(at)
        data = file.read(step) + data
    start = len(data.removesuffix(b"\n"))
    for _ in range(lines):
        start = data.rfind(b"\n", 0, start)
        if start < 0:
            return at
    return at + start + 1
