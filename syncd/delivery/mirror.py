"""Brings to every remote what an end has written to one of them.

Where an end has several, it writes to the first that answers (`syncd.rclone.remotes`); the others
get the same objects here, so that each holds all that is needed to go on without the rest.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import RemoteError
from protocol.wire import Kind, ObjectName
from syncd.delivery.link import Link
from syncd.rclone.remote import NotFound, Remote
from syncd.rclone.remotes import Remotes

# After so long it is looked again at what each of them holds.
LOOK_SECONDS = 60.0
# An object of so many bytes is kept until it is copied, rather than read again.
FRESH_BYTES = 1024 * 1024


def missing(
    wanted: Sequence[ObjectName], there: set[ObjectName], chunks: set[ObjectName]
) -> list[ObjectName]:
    """Return which objects are to be copied, in order, given all that are somewhere.

    What a newer state stands for is not, nor chunks that nothing names any more. Chunks come before
    what names them; then the state, then packs in their order: so a reader that sees one of them
    finds all that it needs.
    """
    base = max((name for name in wanted if name.kind is Kind.STATE), default=None)
    live = [
        name
        for name in wanted
        if (name in chunks if name.kind is Kind.CHUNK else base is None or name.seq > base.seq)
        or name == base
    ]
    order = {Kind.CHUNK: 0, Kind.STATE: 1, Kind.PACK: 2}
    return sorted(set(live) - there, key=lambda name: (order[name.kind], name.seq))


class Mirror:
    """One end's."""

    def __init__(self, link: Link, remotes: Remotes) -> None:
        self._link = link
        self._remotes = remotes
        self._there: dict[Remote, set[ObjectName]] = {}
        self._looked = -math.inf
        self._whole = False  # whether each had everything after the last round
        self._lock = threading.Lock()
        # What was uploaded since: where, and its bytes if it is small.
        self._fresh: dict[ObjectName, tuple[Remote, bytes | None]] = {}
        remotes.uploaded = self._note

    def _note(self, remote: Remote, path: str, source: Path) -> None:
        folder, _, file = path.partition("/")
        name = ObjectName.parse(file)
        if name is not None and folder == str(self._link.writer):
            body = source.read_bytes() if name.length <= FRESH_BYTES else None
            with self._lock:
                self._fresh[name] = (remote, body)

    def round(self) -> None:
        """Copy what is missing to every remote that answers. Raises RemoteError when one fails."""
        self._remotes.probe()
        remotes = self._remotes.each()
        looked = self._look(remotes)
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        if self._whole and not looked and not fresh:
            return
        self._whole = False
        for name, (remote, _) in fresh.items():
            self._there.setdefault(remote, set()).add(name)
        everything = sorted(set().union(*self._there.values()))
        chunks = self._chunks()  # asked for last: they are there before what names them
        bodies = {name: body for name, (_, body) in fresh.items() if body is not None}
        whole, failed = True, None
        for remote in remotes:
            try:
                whole &= self._bring(remote, everything, chunks, bodies)
            except RemoteError as error:  # which keeps the others from nothing
                failed = error
                self._looked = -math.inf  # it may have arrived, and is then left as it is
        if failed:
            raise failed
        self._whole = whole

    def _look(self, remotes: Sequence[Remote]) -> bool:
        """See what each holds, now and then, and when one has come back; return whether it did."""
        now = time.monotonic()
        if set(remotes) == self._there.keys() and now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        self._there = {remote: set(self._link.names_on(remote)) for remote in remotes}
        return True

    def _chunks(self) -> set[ObjectName]:
        paths = self._link.outgoing.kept_objects()
        names = (ObjectName.parse(path.rpartition("/")[2]) for path in paths)
        return {name for name in names if name is not None}

    def _bring(
        self,
        remote: Remote,
        everything: Sequence[ObjectName],
        chunks: set[ObjectName],
        bodies: Mapping[ObjectName, bytes],
    ) -> bool:
        there = self._there[remote]
        for name in missing(everything, there, chunks):
            body = bodies.get(name) or self._read(name)
            if body is None:
                return False  # what comes after it must not be seen before it
            self._link.upload(str(name), body, remote)
            there.add(name)
        return True

    def _read(self, name: ObjectName) -> bytes | None:
        try:
            body = self._remotes.read(f"{self._link.writer}/{name}", limit=name.length)
        except NotFound:
            return None
        return body if len(body) == name.length else None
