"""Contents: bytes by their SHA-256, at this end and on the remote.

Small ones travel inside the message that names them, and are kept in the state until they are
used: a message and what it brought are one transaction. Larger ones travel as chunks, and are
fetched when they are used.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from protocol.errors import DataError, RefusedError
from protocol.messages import Content, Piece
from protocol.publish import publishing, rename_durable
from protocol.schema import decode
from protocol.wire import CHUNK_BYTES
from syncd.delivery.arrivals import Arrivals
from syncd.delivery.chunks import Block, blocks_of
from syncd.delivery.link import Link
from syncd.delivery.uploads import Part, Source, Upload, changed
from syncd.platform import set_mode
from syncd.state import State

INLINE_BYTES = 64 * 1024
# The owner of blobs that were said inside messages, kept until a state needs them or none does.
SAID = "said"
# So much of them is repeated by each state, rather than each state making a chunk of a little.
SAID_BYTES = 256 * 1024
# When more chunks hold less than this, they are joined: each costs its listing again and again.
MANY_CHUNKS = 200
LITTLE_CHUNK = CHUNK_BYTES // 4
# So many contents go into a chunk at most.
JOINED_AT_ONCE = 16_384
# In SQL: contents of this end that are live and lie whole in one chunk, and that chunk.
_CHUNK = "json_extract(pieces, '$[0].object')"
_IN_ONE_CHUNK = (
    "FROM contents JOIN live USING (sha256) WHERE json_array_length(pieces) = 1 AND pieces LIKE ?"
)
MOVED = "contents that were moved"
# What has come so far of a content that is being sent is told so often.
HINT_SECONDS = 0.5


def file_sha256(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes.

    Raises OSError, and DataError when there are fewer: it was cut short meanwhile.
    """
    digest, left = hashlib.sha256(), sys.maxsize if size is None else size
    with open(path, "rb") as file:
        for block in blocks_of(file, left):
            digest.update(block)
            left -= len(block)
    if size is not None and left:
        raise changed("read a file", path)
    return digest.hexdigest()


def _length(pieces: Iterable[Piece]) -> int:
    return sum(piece.length for piece in pieces)


class Contents:
    """What is known of contents; the bytes are fetched when they are wanted."""

    def __init__(self, state: State, folder: Path, link: Callable[[], Link]) -> None:
        """`folder` names these contents apart from others of this end, and its disk is used."""
        self._state = state
        self._folder = folder
        self._owner = folder.name
        self._link = link
        self._arrivals = Arrivals(folder)
        self._hint: Content | None = None
        self._hinted = -math.inf
        # Called when more of a content that the other end waits for has reached the remote.
        self.progressed: Callable[[], None] = lambda: None
        self.uploaded = 0  # bytes of what the last upload was, or is, about

    def receive(self, content: Content) -> None:
        """Keep what a message says of a content. Raises RefusedError when its blob is another."""
        if content.pieces:
            if _length(content.pieces) < content.size:
                if self.pieces(content.sha256):
                    return
                self._expect(content)
            self._note(content.sha256, content.size, content.pieces)
            return
        if hashlib.sha256(content.blob).hexdigest() != content.sha256:
            raise RefusedError(f"receive content {content.sha256[:80]}", why="its bytes are others")
        self._state.run(
            "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)",
            self._owner,
            content.sha256,
            content.blob,
        )

    def _expect(self, content: Content) -> None:
        """Have a content fetched early. They are sent one after another: others that have not come
        by now were given up."""
        for other in self._arrivals.expected():
            if other != content.sha256 and not self.pieces(other):
                self._arrivals.forget(other)
        self._arrivals.expect(content.sha256, content.size)

    def _note(self, sha256: str, size: int, pieces: Sequence[Piece]) -> None:
        text = json.dumps([asdict(piece) for piece in pieces])
        self._state.run("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", sha256, size, text)

    def _known(self, sha256: str) -> tuple[int, tuple[Piece, ...]] | None:
        """The size of a content, and the pieces that are known: its first ones, or all."""
        row = self._state.row("SELECT size, pieces FROM contents WHERE sha256 = ?", sha256)
        if row is None:
            return None
        # Many contents lie in one chunk: its name is kept once.
        values = [{**v, "object": sys.intern(v["object"])} for v in json.loads(row[1])]
        return int(row[0]), tuple(decode(Piece, value) for value in values)

    def pieces(self, sha256: str) -> tuple[Piece, ...]:
        """Where a content lies on the remote; empty when not all of it lies in chunks."""
        size, pieces = self._known(sha256) or (0, ())
        return pieces if _length(pieces) >= size else ()

    def on_remote(self) -> set[str]:
        """Return every content that lies in chunks on the remote."""
        rows = self._state.rows(
            "SELECT sha256 FROM contents WHERE size <="
            " (SELECT SUM(json_extract(value, '$.length')) FROM json_each(pieces))"
        )
        return {str(sha256) for (sha256,) in rows}

    def upload(self, sources: Iterable[Source]) -> dict[Path, OSError | DataError]:
        """Bring files to the remote as chunks, but for contents that are there; may take long.

        Returns which could not be read, or are no longer what their hash says. Raises RemoteError
        when the remote cannot be reached; another call goes on where this one was.
        """
        wanted = (source for source in sources if not self.pieces(source.sha256))
        if (first := next(wanted, None)) is None:
            return {}
        upload = Upload(self._link().chunks, self._begun)
        self.uploaded = 0
        for parts in upload.run(itertools.chain([first], wanted)):
            with self._state.transaction():
                for part in parts:
                    self._add(part)
                    self.uploaded += part.length
            self.progressed()
        return upload.failed

    def _begun(self, sha256: str) -> tuple[Piece, ...]:
        _, pieces = self._known(sha256) or (0, ())
        return pieces

    def _add(self, part: Part) -> None:
        """Note that a part of a content is on the remote, and all that comes before it."""
        source, before = part.source, list[Piece]()
        for piece in self._begun(source.sha256) if part.at else ():
            if _length(before) < part.at:
                before.append(piece)
        pieces = (*before, part.piece)
        self._note(source.sha256, source.size, pieces)
        if not source.awaited or _length(pieces) == source.size:
            self._hint = None
        elif time.monotonic() - self._hinted > HINT_SECONDS:
            self._hint = Content(sha256=source.sha256, size=source.size, pieces=pieces)

    def coming(self) -> list[Content]:
        """Return what was not said yet of contents: those that lie elsewhere now, and what there is
        of one that is being sent, which the other end may fetch meanwhile.

        Call it inside a transaction.
        """
        moved = self._state.get(MOVED)
        if moved:
            self._state.put(MOVED, [])
        found = [(sha256, self._known(sha256)) for sha256 in moved or ()]
        said = [Content(sha256=s, size=known[0], pieces=known[1]) for s, known in found if known]
        hint, self._hint = self._hint, None
        if hint is None:
            return said
        self._hinted = time.monotonic()
        return [*said, hint]

    def message(self, path: Path, sha256: str, size: int) -> Content | None:
        """Return the message that brings a file's content; None when the file is another now."""
        pieces = self.pieces(sha256)
        if pieces:
            return Content(sha256=sha256, size=size, pieces=pieces)
        try:
            with open(path, "rb") as file:
                blob = file.read(size)
        except OSError:
            return None
        if len(blob) < size or hashlib.sha256(blob).hexdigest() != sha256:
            return None
        self._state.run("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", SAID, sha256, blob)
        return Content(sha256=sha256, size=size, blob=blob)

    def pack_up(self, live: Iterable[tuple[str, Path]]) -> None:
        """Join contents that were said inside messages into chunks, and small chunks into larger
        ones; forget all contents but the `live`, which are given with their files."""
        self._note_live(live)
        self._forget_dead()
        self._join_said()
        self._join_chunks()

    def _note_live(self, live: Iterable[tuple[str, Path]]) -> None:
        """Keep these beside the state: there may be very many."""
        self._state.run(
            "CREATE TEMP TABLE IF NOT EXISTS live"
            " (sha256 TEXT PRIMARY KEY, path BLOB NOT NULL) WITHOUT ROWID"
        )
        self._state.run("DELETE FROM live")
        for sha256, path in live:
            self._state.run("INSERT OR REPLACE INTO live VALUES (?, ?)", sha256, os.fsencode(path))

    def _forget_dead(self) -> None:
        dead = "sha256 NOT IN (SELECT sha256 FROM live)"
        with self._state.transaction():
            self._state.run(f"DELETE FROM blobs WHERE owner = ? AND {dead}", SAID)
            self._state.run(
                f"DELETE FROM contents WHERE pieces LIKE ? AND {dead}", self._own_pieces()
            )

    def _join_said(self) -> None:
        row = self._state.row("SELECT SUM(LENGTH(data)) FROM blobs WHERE owner = ?", SAID)
        if row is None or int(row[0] or 0) <= SAID_BYTES:
            return
        while group := self._next_said():
            self._join(group)

    def _next_said(self) -> list[str]:
        """Return the next contents that go into one chunk, empty when none is left."""
        group: list[str] = []
        total = 0
        for sha256, length in self._state.rows(
            "SELECT sha256, LENGTH(data) FROM blobs WHERE owner = ? LIMIT ?", SAID, JOINED_AT_ONCE
        ):
            total += int(length)
            if group and total > CHUNK_BYTES:
                break
            group.append(str(sha256))
        return group

    def _join(self, group: list[str]) -> None:
        """Put a group of contents into one chunk."""
        blobs = [self._said(sha256) or b"" for sha256 in group]
        name = self._link().put_chunk(b"".join(blobs), compress=True)
        at = 0
        with self._state.transaction():
            for sha256, blob in zip(group, blobs, strict=True):
                piece = Piece(object=name, offset=at, length=len(blob))
                at += len(blob)
                self._note(sha256, len(blob), (piece,))
                self._state.run("DELETE FROM blobs WHERE owner = ? AND sha256 = ?", SAID, sha256)

    def _join_chunks(self) -> None:
        """Where there are many chunks of this end that hold little, make larger ones from the
        files, and have the other end told where the contents lie now."""
        little = self._state.rows(
            f"SELECT {_CHUNK} {_IN_ONE_CHUNK} GROUP BY 1 HAVING SUM(size) < ?",
            self._own_pieces(),
            LITTLE_CHUNK,
        )
        if len(little) <= MANY_CHUNKS:
            return
        held = self._state.rows(
            f"SELECT {_CHUNK}, sha256, size, path {_IN_ONE_CHUNK} ORDER BY 1", self._own_pieces()
        )
        chosen = {chunk for (chunk,) in little}
        sources = (
            Source(path=Path(os.fsdecode(path)), sha256=str(sha256), size=int(size))
            for chunk, sha256, size, path in held
            if chunk in chosen
        )
        for parts in Upload(self._link().chunks, lambda sha256: ()).run(sources):
            with self._state.transaction():
                moved = self._state.get(MOVED, [])
                for part in parts:
                    self._add(part)
                    moved.append(part.source.sha256)
                self._state.put(MOVED, moved)

    def _own_pieces(self) -> str:
        """What pieces look like, in SQL, that lie in chunks of this end."""
        return f'%"object": "{self._link().role[0]}-%'

    def _said(self, sha256: str) -> bytes | None:
        row = self._state.row("SELECT data FROM blobs WHERE owner = ? AND sha256 = ?", SAID, sha256)
        return bytes(row[0]) if row else None

    def again(self, sha256: str, size: int) -> Content | None:
        """Return the message for a content that was said before; None when it is not to be had."""
        pieces = self.pieces(sha256)
        if pieces:
            return Content(sha256=sha256, size=size, pieces=pieces)
        blob = self._said(sha256)
        return None if blob is None else Content(sha256=sha256, size=size, blob=blob)

    def lose(self, chunks: Collection[str]) -> list[str]:
        """Forget where contents lay that had a part in one of these; return their hashes."""
        rows = self._state.rows("SELECT sha256, pieces FROM contents")
        lost = [
            str(sha256)
            for sha256, text in rows
            if any(value["object"] in chunks for value in json.loads(text))
        ]
        for sha256 in lost:
            self._state.run("DELETE FROM contents WHERE sha256 = ?", sha256)
        return lost

    def objects(self) -> set[str]:
        """Return every chunk that holds a known content, as pieces name them."""
        rows = self._state.rows(
            "SELECT DISTINCT json_extract(value, '$.object') FROM contents, json_each(pieces)"
        )
        return {str(chunk) for (chunk,) in rows}

    def fetch_early(self) -> None:
        """Fetch what is known of contents that are still being sent; may take long.

        Raises RemoteError when the remote cannot be reached.
        """
        for sha256 in self._arrivals.expected():
            size, pieces = self._known(sha256) or (0, ())
            if self.room_for(sha256, size):
                self._arrivals.extend(sha256, pieces, self._read)

    def _read(self, pieces: Sequence[Piece]) -> Iterator[Block]:
        return self._link().read_pieces(pieces, trusting=True)

    def place(self, sha256: str, target: Path, *, mode: int, size: int) -> None:
        """Publish a content of `size` bytes as a file, fetching it if it is not here.

        Raises RemoteError when it cannot be fetched, DataError when it is nowhere or not whole.
        """
        if self._move(sha256, target, mode=mode, durable=True):
            return
        with publishing(target, mode=0o600) as file:
            self._copy(sha256, file, target, size)
            set_mode(file.fileno(), mode & 0o777 | 0o600)

    def write(self, sha256: str, target: Path, *, mode: int, size: int) -> None:
        """Like `place`, but neither atomic nor durable: for a folder that is published whole."""
        if self._move(sha256, target, mode=mode, durable=False):
            return
        with open(target, "wb") as file:
            self._copy(sha256, file, target, size)
        target.chmod(mode & 0o777 | 0o600)

    def _move(self, sha256: str, target: Path, *, mode: int, durable: bool) -> bool:
        """Put a content that was fetched early in place; return whether there was one."""
        if sha256 not in self._arrivals.expected():
            return False
        with self._arrivals.whole(sha256, self.pieces(sha256), self._read) as path:
            if path is None:
                return False
            with open(path, "r+b") as file:
                set_mode(file.fileno(), mode & 0o777 | 0o600)
                if durable:
                    os.fsync(file.fileno())
            try:
                rename_durable(path, target) if durable else os.replace(path, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                return False
        return True

    def _copy(self, sha256: str, file: IO[bytes], target: Path, size: int) -> None:
        digest = hashlib.sha256()
        for block in self._blocks(sha256):
            size -= len(block)
            if size < 0:  # there was room for as many as were announced
                raise DataError("fetch a file", path=target, why="it is larger than announced")
            digest.update(block)
            file.write(block)
        if digest.hexdigest() != sha256:
            raise DataError("fetch a file", path=target, why="its bytes are not those announced")

    def _blocks(self, sha256: str) -> Iterator[Block]:
        blob = self._state.row(
            "SELECT data FROM blobs WHERE owner = ? AND sha256 = ?", self._owner, sha256
        )
        if blob is not None:
            yield bytes(blob[0])
            return
        known = self._known(sha256)
        if known is None:
            raise DataError(f"fetch content {sha256}", why="it was never announced")
        size, pieces = known
        if _length(pieces) != size:
            raise DataError(f"fetch content {sha256}", why="its pieces do not add up")
        yield from self._read(pieces)

    def forget(self, sha256: str) -> None:
        """Drop this end's copy, and what was fetched of it early."""
        self._arrivals.forget(sha256)
        self._state.run("DELETE FROM blobs WHERE owner = ? AND sha256 = ?", self._owner, sha256)

    def keep_only(self, wanted: set[str]) -> None:
        """Drop this end's copies of all but the contents in `wanted`."""
        kept = self._state.rows("SELECT sha256 FROM blobs WHERE owner = ?", self._owner)
        with self._state.transaction():
            for sha256 in {str(sha256) for (sha256,) in kept} | set(self._arrivals.expected()):
                if sha256 not in wanted:
                    self.forget(sha256)

    def room_for(self, sha256: str, size: int) -> bool:
        """Whether a content of `size` bytes fits on this end's disk with a little to spare."""
        needed = size - self._arrivals.held(sha256)
        return shutil.disk_usage(self._folder).free > needed + 64 * 1024 * 1024
