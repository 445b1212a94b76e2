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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.errors import DataError

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
-- Packs that were made and are not on the remote yet.
CREATE TABLE outbox (seq INTEGER PRIMARY KEY, name TEXT NOT NULL, body BLOB NOT NULL);
-- For each writer that is read: the next pack, and the last that counts (NULL: no end).
CREATE TABLE peers (writer TEXT PRIMARY KEY, next INTEGER NOT NULL, last INTEGER);
-- Where the bytes of a content lie on the remote: JSON list of pieces.
CREATE TABLE contents (sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, pieces TEXT NOT NULL);
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
    path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    mode INTEGER NOT NULL, sha256 TEXT NOT NULL, sent INTEGER NOT NULL
);
-- Growing files that are sent: how far.
CREATE TABLE tails (
    path TEXT NOT NULL, inode INTEGER NOT NULL, stream TEXT NOT NULL, sent INTEGER NOT NULL,
    PRIMARY KEY (path, inode)
);
-- Growing files that are put together: how far the stream was read, how long the file is.
CREATE TABLE joins (
    path TEXT PRIMARY KEY, stream TEXT NOT NULL, read INTEGER NOT NULL, length INTEGER NOT NULL
);
-- The journal's records, and results, by what makes them one.
CREATE TABLE journal (key TEXT PRIMARY KEY, place INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE runs (run_id TEXT PRIMARY KEY, place INTEGER NOT NULL, record TEXT NOT NULL);
"""


class State:
    """The open database. Safe to use from several threads; transactions nest."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises DataError when it cannot be read, or is of a newer version."""
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            elif version != SCHEMA_VERSION:
                raise DataError(
                    "open the state",
                    path=path,
                    why=f"it is of version {version}",
                    hint="Use the syncd that wrote it, or a newer one.",
                )
        except sqlite3.Error as error:
            raise DataError(
                "open the state",
                path=path,
                why=str(error),
                hint="Move it away to start anew from what lies on the remote.",
            ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Do everything inside durably, or nothing of it. Nested ones join the outer one."""
        with self._lock:
            if self._depth == 0:
                self._db.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                if self._depth == 0:
                    self._db.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self._db.execute("COMMIT")

    def run(self, sql: str, *values: Any) -> None:
        """Execute one statement."""
        with self._lock:
            self._db.execute(sql, values)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
            return row

    def get(self, key: str, default: Any = None) -> Any:
        """Return a named JSON value."""
        row = self.row("SELECT value FROM meta WHERE key = ?", key)
        return default if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keep a named JSON value."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))
