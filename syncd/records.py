"""The journal and the results at one end: kept in the state, shown as files.

The journal's file is appended to, durably, before anything follows from a record. The state holds
the same records, which tells apart those that are new, and lets a damaged file be written anew.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from protocol.errors import DataError
from protocol.journal import JournalRecord, advance, fold, parse_journal, parse_record
from protocol.publish import append_durable, drop_torn_line, publish_bytes
from protocol.results import Results, RunRecord
from protocol.schema import decode
from protocol.states import State as CommandState
from syncd.state import State

log = logging.getLogger("syncd")


class JournalFile:
    """`journal.jsonl`, and what every command's newest record is."""

    def __init__(self, state: State, path: Path) -> None:
        self._state = state
        self._path = path
        self._reconcile()
        rows = state.rows("SELECT record FROM journal ORDER BY place")
        self.newest = fold(parse_record(row[0].encode()) for row in rows)

    def _reconcile(self) -> None:
        """Make file and state agree after a crash or an edit by hand: records are never lost."""
        drop_torn_line(self._path)
        data = self._path.read_bytes() if self._path.exists() else b""
        records, problems = parse_journal(data)
        with self._state.transaction():
            for record in records:
                self._insert(record)
        kept = [row[0].encode() for row in self._state.rows(_RECORDS)]
        if problems or len(kept) != len(records):
            if problems:
                _set_aside(self._path, data, f"line {problems[0].line_number}: {problems[0].why}")
            publish_bytes(self._path, b"".join(kept))

    def _insert(self, record: JournalRecord) -> bool:
        key = json.dumps(record.key)
        if self._state.row("SELECT 1 FROM journal WHERE key = ?", key):
            return False
        self._state.run(
            "INSERT INTO journal SELECT ?, COALESCE(MAX(place), 0) + 1, ? FROM journal",
            key,
            record.encode().decode("ascii"),
        )
        return True

    def add(self, record: JournalRecord) -> bool:
        """Record a step, durably in both; return whether it was new."""
        with self._state.transaction():
            if not self._insert(record):
                return False
            append_durable(self._path, record.encode())
        advance(self.newest, record)
        return True

    def since(self, place: int, budget: int) -> list[tuple[int, JournalRecord]]:
        """Return records after `place`, with their places, up to `budget` bytes of them."""
        found: list[tuple[int, JournalRecord]] = []
        for at, text in self._state.rows(
            "SELECT place, record FROM journal WHERE place > ? ORDER BY place LIMIT 10000", place
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

    def attempts(self, number: int, worker: str) -> int:
        """How many attempts of a command a worker started."""
        # Keys are JSON lists that begin with the number, so these are a range of the index.
        row = self._state.row(
            "SELECT COUNT(*) FROM journal WHERE key >= ? AND key < ?"
            " AND json_extract(key, '$[1]') = ? AND json_extract(key, '$[3]') = ?",
            f"[{number},",
            f"[{number}-",
            CommandState.STARTED,
            worker,
        )
        return int(row[0]) if row else 0


_RECORDS = "SELECT record FROM journal ORDER BY place"


class ResultsFile:
    """`results.json`, written from the state."""

    def __init__(self, state: State, path: Path) -> None:
        self._state = state
        self._path = path
        self.publish()

    def add(self, run: RunRecord) -> bool:
        """Keep a run's record; return whether it says anything new."""
        text = json.dumps(run.to_json(), sort_keys=True)
        row = self._state.row("SELECT record FROM runs WHERE run_id = ?", run.run_id)
        if row and row[0] == text:
            return False
        self._state.run(
            "INSERT OR REPLACE INTO runs SELECT ?, COALESCE(MAX(place), 0) + 1, ? FROM runs",
            run.run_id,
            text,
        )
        return True

    def get(self, run_id: str) -> RunRecord | None:
        """Return a run's record, or None."""
        row = self._state.row("SELECT record FROM runs WHERE run_id = ?", run_id)
        return decode(RunRecord, json.loads(row[0])) if row else None

    def publish(self) -> None:
        """Write the file if it is not what the state says; a copy edited by hand is kept aside."""
        wanted = Results(run for _, run in self.since(0))
        try:
            found = Results.load(self._path)
            if found.runs == wanted.runs:
                return
        except DataError as error:
            _set_aside(self._path, self._path.read_bytes(), error.why)
        wanted.save(self._path)

    def since(self, place: int) -> list[tuple[int, RunRecord]]:
        """Return records that changed after `place`, with their places."""
        rows = self._state.rows(
            "SELECT place, record FROM runs WHERE place > ? ORDER BY place", place
        )
        return [(int(at), decode(RunRecord, json.loads(text))) for at, text in rows]


def _set_aside(path: Path, data: bytes, why: str) -> None:
    aside = path.with_name(f"{path.name}.edited-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    publish_bytes(aside, data)
    log.warning("%s was changed by hand (%s): kept as %s, written anew", path, why, aside.name)
