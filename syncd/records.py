"""The journal and the results at one end: kept in the state, shown as files.

The journal's file is appended to, durably, before anything follows from a record. The state holds
the same records, which tells apart those that are new, and lets a damaged file be written anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from pathlib import Path

from protocol.errors import DataError
from protocol.journal import JournalRecord, advance, fold, parse_journal, parse_record
from protocol.publish import (
    append_durable,
    fsync_dir,
    make_durable,
    publish_bytes,
    rename_durable,
)
from protocol.results import Results, RunRecord
from protocol.schema import decode
from protocol.states import State as CommandState
from syncd.state import State

log = logging.getLogger("syncd")


class Newest(Mapping[int, JournalRecord]):
    """Every command's newest record. One thread may go through it while another adds."""

    def __init__(self, records: Iterable[JournalRecord]) -> None:
        self._records = fold(records)

    def __getitem__(self, number: int) -> JournalRecord:
        return self._records[number]

    def __len__(self) -> int:
        return len(self._records)

    # Copying a dict is one step of the interpreter; going through it is not.

    def __iter__(self) -> Iterator[int]:
        return iter(self._records.copy())

    def values(self) -> ValuesView[JournalRecord]:
        return self._records.copy().values()

    def items(self) -> ItemsView[int, JournalRecord]:
        return self._records.copy().items()

    def advance(self, record: JournalRecord) -> None:
        """Take in one more record."""
        advance(self._records, record)


class JournalFile:
    """`journal.jsonl`, and what every command's newest record is."""

    def __init__(self, state: State, path: Path, *, copy: bool = False) -> None:
        """With `copy` it is the other end's journal: a file that cannot be written then keeps
        nothing from being recorded. It is named in `problem`, and written by `catch_up`."""
        self.problem = ""
        self._state = state
        self._path = path
        self._copy = copy
        self._load()
        with self._may_fail():
            self._reconcile()

    def _reconcile(self) -> None:
        """Make file and state agree after a crash or an edit by hand: records are never lost."""
        data = self._path.read_bytes() if self._path.is_file() else b""
        whole = data[: data.rfind(b"\n") + 1]
        kept, why = self._text(), "it is not what was recorded"
        if whole.startswith(kept):
            # A record is in the file before the state is sure of it.
            records, problems = parse_journal(whole[len(kept) :])
            with self._state.transaction():
                for record in records:
                    self._insert(record)
            if problems:
                at = kept.count(b"\n") + problems[0].line_number
                why = f"line {at}: {problems[0].why}"
            kept = self._text()
        if whole != kept:
            _set_aside(self._path, why)
        if data != kept:
            publish_bytes(self._path, kept)
        elif kept:
            make_durable(self._path)
        self._load()

    def _text(self) -> bytes:
        return b"".join(row[0].encode() for row in self._state.rows(_RECORDS))

    def _load(self) -> None:
        rows = self._state.rows(_RECORDS)
        self.newest = Newest(parse_record(row[0].encode()) for row in rows)
        self._length = sum(len(row[0]) for row in rows)

    def _insert(self, record: JournalRecord) -> bool:
        changed = self._state.run(
            "INSERT OR IGNORE INTO journal (key, record) VALUES (?, ?)",
            json.dumps(record.key),
            record.encode().decode("ascii"),
        )
        return changed > 0

    def add(self, record: JournalRecord) -> bool:
        """Record a step, durably in both; return whether it was new."""
        line = record.encode()
        with self._state.transaction():
            self._state.on_rollback(self._load)
            self.catch_up()
            if not self._insert(record):
                return False
            if not self.problem:
                with self._may_fail():
                    append_durable(self._path, line)
            self._length += len(line)
            self.newest.advance(record)
        return True

    def catch_up(self) -> None:
        """Write the file anew if it is not what was recorded."""
        with self._state.transaction():  # while nobody adds anything
            if self.problem or not self._agrees():
                with self._may_fail():
                    self._reconcile()

    @contextlib.contextmanager
    def _may_fail(self) -> Iterator[None]:
        """Write to the file: for a copy, what goes wrong is noted and no more."""
        try:
            yield
        except OSError as error:
            if not self._copy:
                raise
            self.problem = f"cannot be written: {error.strerror or error}"
        else:
            self.problem = ""

    def _agrees(self) -> bool:
        """Whether the file is as long as it was left. An edit, or a rollback, changes that."""
        try:
            return self._path.stat().st_size == self._length
        except FileNotFoundError:
            return self._length == 0

    def payloads_in_use(self) -> set[int]:
        """Orders of the snapshots of runs that were claimed and have not ended."""
        records = self.newest.values()
        return {r.snapshot for r in records if r.state is not CommandState.ENDED and r.snapshot}

    def since(self, place: int, budget: int) -> list[tuple[int, JournalRecord]]:
        """Return records after `place`, with their places, up to `budget` bytes of them."""
        found: list[tuple[int, JournalRecord]] = []
        for at, text in self._state.rows(
            "SELECT place, record FROM journal WHERE place > ? ORDER BY place", place
        ):
            budget -= len(text)
            if found and budget < 0:
                break
            found.append((int(at), parse_record(text.encode())))
        return found

    def at(self, place: int) -> JournalRecord | None:
        """Return the record at a place."""
        row = self._state.row("SELECT record FROM journal WHERE place = ?", place)
        return parse_record(row[0].encode()) if row else None

    def place(self, record: JournalRecord) -> int:
        """Return where a record stands."""
        row = self._state.row("SELECT place FROM journal WHERE key = ?", json.dumps(record.key))
        return int(row[0]) if row else 0


_RECORDS = "SELECT record FROM journal ORDER BY place"


class ResultsFile:
    """`results.json`, written from the state by `publish`."""

    def __init__(self, state: State, path: Path) -> None:
        self._state = state
        self._path = path
        self._written: tuple[int, int, int] | None = None
        self._stale = True

    def add(self, run: RunRecord) -> bool:
        """Keep a run's record; return whether it says anything new."""
        text = json.dumps(run.to_json(), sort_keys=True)
        row = self._state.row("SELECT record FROM runs WHERE run_id = ?", run.run_id)
        if row and row[0] == text:
            return False
        self._state.run(
            "INSERT OR REPLACE INTO runs (run_id, record) VALUES (?, ?)", run.run_id, text
        )
        self._stale = True
        return True

    def get(self, run_id: str) -> RunRecord | None:
        """Return a run's record, or None."""
        row = self._state.row("SELECT record FROM runs WHERE run_id = ?", run_id)
        return decode(RunRecord, json.loads(row[0])) if row else None

    def publish(self) -> None:
        """Write the file if it is not what the state says; a copy edited by hand is kept aside."""
        untouched = self._written is not None and self._written == self._look()
        if untouched and not self._stale:
            return
        if not untouched:
            try:
                Results.load(self._path)
            except DataError as error:
                _set_aside(self._path, error.why)
        # Before it is read: what another thread adds from here on is for its own publishing.
        self._stale = False
        Results(run for _, run in self.since(0)).save(self._path)
        self._written = self._look()

    def _look(self) -> tuple[int, int, int] | None:
        """What shows that the file is the one that was written."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns, found.st_ino)

    def since(self, place: int) -> list[tuple[int, RunRecord]]:
        """Return records that changed after `place`, with their places."""
        rows = self._state.rows(
            "SELECT place, record FROM runs WHERE place > ? ORDER BY place", place
        )
        return [(int(at), decode(RunRecord, json.loads(text))) for at, text in rows]


def _set_aside(path: Path, why: str) -> None:
    """Move a file that someone changed out of the way, under a name that nothing has."""
    if not path.exists():
        fsync_dir(path.parent)  # who moved it away may have been killed before this
        return
    stem = f"{path.name}.edited-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    aside = next(a for a in map(path.with_name, names) if not a.exists())
    # Not every editor makes durable what it writes. What cannot be opened is moved all the same.
    if path.is_file():
        with contextlib.suppress(OSError), open(path, "r+b") as edited:
            os.fsync(edited.fileno())
    rename_durable(path, aside)
    log.warning("%s was changed by hand (%s): kept as %s, written anew", path, why, aside.name)
