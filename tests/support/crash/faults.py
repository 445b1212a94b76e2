"""Faults that a crash test puts into the daemons on purpose, to see that it sees them.

Each is a step left out, or taken too early, as a change of syncd might do by mistake.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import protocol.publish
import syncd.delivery.link
from protocol.messages import Append, Journal
from syncd.delivery.joins import Joins
from syncd.delivery.link import Link
from syncd.state import State as Database


def scan_is_kept_too_late() -> None:
    """The last scan of the queue is kept after the commands that it numbered, not with them."""
    put, transaction = Database.put, Database.transaction
    late: list[Any] = []

    def put_late(state: Database, key: str, value: Any) -> None:
        if key == "queue" and state._depth > 0:
            late.append(value)
        else:
            put(state, key, value)

    @contextlib.contextmanager
    def kept_late(state: Database) -> Iterator[None]:
        with transaction(state):
            yield
        if state._depth == 0:
            keep(state)

    def keep(state: Database) -> None:
        while late:
            put(state, "queue", late.pop(0))

    Database.put, Database.transaction = put_late, kept_late


def pack_is_read_before_it_is_applied() -> None:
    """The reading cursor moves past a pack of records, and only then is the pack applied."""
    apply = Link._apply

    def applied(link: Link, writer: Any, candidates: Any, seq: int) -> bool:
        if any(isinstance(m, Journal) for m in link._read(writer, candidates[0]) or ()):
            link.peers.move_on(writer, seq + 1)
        return apply(link, writer, candidates, seq)

    Link._apply = applied
    # A state says it all again, and would make it good.
    syncd.delivery.link.STATE_PACKS = syncd.delivery.link.FEW_PACKS = 10**6


def cursor_of_a_log_is_not_kept() -> None:
    """A log's segment is appended, and how far it was read is not noted."""
    apply = Joins.apply

    def applied(joins: Joins, message: Append) -> None:
        row = joins._state.row("SELECT * FROM joins WHERE path = ?", message.path)
        apply(joins, message)
        if row:
            joins._state.run("DELETE FROM joins WHERE path = ?", message.path)

    Joins.apply = applied


def files_are_written_in_place() -> None:
    """What should be published by a rename is written where readers see it."""

    @contextlib.contextmanager
    def in_place(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
        with open(path, "wb", buffering=0) as file:
            yield _Slow(file.fileno(), "wb", closefd=False)
        os.chmod(path, mode)

    protocol.publish.publishing = in_place


class _Slow(io.FileIO):
    def write(self, data: Any) -> int:
        half = len(data) // 2
        super().write(data[:half])
        time.sleep(0.1)
        return half + int(super().write(data[half:]) or 0)


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        scan_is_kept_too_late,
        pack_is_read_before_it_is_applied,
        cursor_of_a_log_is_not_kept,
        files_are_written_in_place,
    )
}
