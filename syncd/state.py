"""An end's private, durable state: one SQLite file in `.syncd/`.

What both ends see lives in plain files; this holds what makes delivery exact: what was sent and
read, which contents and files are known, which commands were given. One transaction covers a
pack that was applied and the cursor that says so, and likewise a pack that was made and the
cursors of what went into it, so a crash between two steps leaves neither half done.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from protocol.errors import DataError

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
-- Packs that were made and are not on the remote yet.
CREATE TABLE outbox (seq INTEGER PRIMARY KEY, name TEXT NOT NULL, body BLOB NOT NULL);
-- For each writer that is read: the next pack, and the last that counts (NULL: no end).
CREATE TABLE peers (writer TEXT PRIMARY KEY, next INTEGER NOT NULL, last INTEGER);
-- Where the bytes of a content lie on the remote: JSON list of pieces.
CREATE TABLE contents (sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, pieces TEXT NOT NULL);
-- The bytes of small contents that arrived and are still to be used.
CREATE TABLE blobs (
    owner TEXT NOT NULL, sha256 TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (owner, sha256)
);
-- Commands as the controller numbered them.
CREATE TABLE commands (number INTEGER PRIMARY KEY, message TEXT NOT NULL);
-- Snapshots of serve/: the controller's and, at the worker, what arrived.
CREATE TABLE snapshots (
    place INTEGER PRIMARY KEY, id TEXT NOT NULL, files BLOB NOT NULL, ready INTEGER NOT NULL
);
-- Files below in/ and store/: what the other end (or a predecessor) says they are.
CREATE TABLE remote_files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mode INTEGER NOT NULL, sha256 TEXT NOT NULL,
    here INTEGER NOT NULL
);
-- Files of this end, as they were when they were last looked at.
CREATE TABLE local_files (
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, changed_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL, mode INTEGER NOT NULL, sha256 TEXT NOT NULL, sent INTEGER NOT NULL
);
-- Growing files that are sent: how far, and a digest that tells whether it is still that file.
CREATE TABLE tails (
    path TEXT NOT NULL, inode INTEGER NOT NULL, stream TEXT NOT NULL, sent INTEGER NOT NULL,
    mark TEXT NOT NULL, PRIMARY KEY (path, inode)
);
-- Segments of growing files that were sent and are not acknowledged yet: the pack, how far.
CREATE TABLE marks (
    seq INTEGER NOT NULL, path TEXT NOT NULL, stream TEXT NOT NULL, end INTEGER NOT NULL
);
CREATE INDEX marks_of ON marks (path, stream, seq);
-- The same segments, joined into chunks so that their packs can go: JSON of an append message.
CREATE TABLE tail_chunks (
    path TEXT NOT NULL, stream TEXT NOT NULL, end INTEGER NOT NULL, message TEXT NOT NULL
);
-- Growing files that are put together: how far the stream was read, how long the file is.
CREATE TABLE joins (
    path TEXT PRIMARY KEY, stream TEXT NOT NULL, read INTEGER NOT NULL, length INTEGER NOT NULL
);
-- Segments of growing files that could not be written yet, in order.
CREATE TABLE parked (
    place INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, stream TEXT NOT NULL,
    start INTEGER NOT NULL, end INTEGER NOT NULL, data BLOB NOT NULL
);
-- The journal's records, and results, by what makes them one. A place is never given twice.
CREATE TABLE journal (
    place INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, record TEXT NOT NULL
);
CREATE TABLE runs (
    place INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL UNIQUE, record TEXT NOT NULL
);
"""
# What later versions have added, in order: the first makes it version 2.
_ADDED = (
    """
-- Files of checkpoints whose contents are on the remote; see syncd/delivery/groups.py.
CREATE TABLE checkpoints (
    path TEXT NOT NULL, sha256 TEXT NOT NULL, size INTEGER NOT NULL, mode INTEGER NOT NULL,
    made_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    first INTEGER NOT NULL, last INTEGER NOT NULL, gone INTEGER NOT NULL DEFAULT 0,
    told INTEGER NOT NULL DEFAULT 0, pack INTEGER NOT NULL DEFAULT 0,
    proved REAL, how TEXT NOT NULL DEFAULT '', PRIMARY KEY (path, sha256)
);
INSERT INTO checkpoints (path, sha256, size, mode, made_ns, inode, first, last, told, pack)
    SELECT path, sha256, size, mode, 0, inode, 1, 1, 1, 1 FROM local_files
    WHERE path LIKE 'store/checkpoints/%/%' AND sent = 1 AND sha256 != ''
        AND path NOT LIKE '%.log' AND path NOT LIKE '%.jsonl' AND path NOT LIKE '%tfevents.%';
DELETE FROM local_files WHERE path IN (SELECT path FROM checkpoints);
-- Chunks of this end: their hash of another kind than the name's, and how they were proved.
CREATE TABLE proofs (
    object TEXT PRIMARY KEY, digest TEXT NOT NULL DEFAULT '', how TEXT NOT NULL DEFAULT ''
);
-- Chunks of the other end: 0 to be looked at on this disk, 1 right, 2 said to be.
CREATE TABLE stored (object TEXT PRIMARY KEY, step INTEGER NOT NULL);
""",
    """
-- The groups that checkpoint files are in: this worker's, and those of its predecessors.
ALTER TABLE checkpoints ADD COLUMN until INTEGER NOT NULL DEFAULT 0;
UPDATE checkpoints SET until = -1;
CREATE TABLE checkpoint_groups (
    run TEXT NOT NULL, number INTEGER NOT NULL, files INTEGER NOT NULL, size INTEGER NOT NULL,
    brought INTEGER NOT NULL, missing TEXT NOT NULL,
    pack INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run, number)
);
ALTER TABLE remote_files ADD COLUMN first INTEGER NOT NULL DEFAULT 0;
ALTER TABLE remote_files ADD COLUMN until INTEGER NOT NULL DEFAULT 0;
CREATE TABLE remote_groups (
    run TEXT NOT NULL, number INTEGER NOT NULL, files INTEGER NOT NULL, PRIMARY KEY (run, number)
);
""",
)
SCHEMA_VERSION = 1 + len(_ADDED)
# What the machine, and not our SQL, is to blame for: the primary result codes of sqlite.org/rescode
_MACHINE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)


class State:
    """The open database. Safe to use from several threads; transactions nest.

    Every method raises DataError where the disk is at fault: full, unreadable, damaged.
    """

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises DataError when it cannot be read, or is of a newer version."""
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        self._undo: dict[Callable[[], None], None] = {}
        with self._translated("open the state", "Move it away to start anew from the remote."):
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            with self._translated("open the state", "Move it away to start anew from the remote."):
                path.chmod(0o600)
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version < SCHEMA_VERSION:
            steps = "".join((_SCHEMA, *_ADDED)[version:])
            self._db.executescript(
                f"BEGIN; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        elif version != SCHEMA_VERSION:
            raise DataError(
                "open the state",
                path=self.path,
                why=f"it is of version {version}",
                hint="Use the syncd that wrote it, or a newer one.",
            )

    @contextlib.contextmanager
    def _translated(self, what: str = "keep the state", hint: str = "") -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None or code & 0xFF not in _MACHINE:
                raise
            raise DataError(what, path=self.path, why=str(error), hint=hint) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Do everything inside durably, or nothing of it. Nested ones join the outer one."""
        with self._lock:
            if self._depth == 0:
                self._execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                if self._depth == 1:
                    self._execute("COMMIT")
                    self._undo.clear()
            except BaseException:
                if self._depth == 1:
                    self._roll_back()
                raise
            finally:
                self._depth -= 1

    def _roll_back(self) -> None:
        # SQLite itself has rolled back after some errors, a full disk among them.
        if self._db.in_transaction:
            self._execute("ROLLBACK")
        undo, self._undo = self._undo, {}
        for each in undo:
            each()

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Inside a transaction: have `undo` called, once, if it is taken back.

        For what is kept in memory beside the state.
        """
        with self._lock:
            if self._depth == 0:
                raise RuntimeError("there is no transaction")
            self._undo[undo] = None

    def _execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._translated():
            return self._db.execute(sql, values)

    def run(self, sql: str, *values: Any) -> int:
        """Execute one statement; return how many rows it changed."""
        with self._lock:
            return self._execute(sql, values).rowcount

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, self._translated():
            return self._db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        with self._lock, self._translated():
            row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
            return row

    def get(self, key: str, default: Any = None) -> Any:
        """Return a named JSON value."""
        row = self.row("SELECT value FROM meta WHERE key = ?", key)
        return default if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keep a named JSON value."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))
