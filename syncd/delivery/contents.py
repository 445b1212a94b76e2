"""Contents: bytes by their SHA-256, at this end and on the remote.

Small ones travel inside the message that names them, and are kept in the state until they are
used: a message and what it brought are one transaction. Larger ones travel as chunks, and are
fetched when they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

from protocol.errors import DataError, RefusedError
from protocol.messages import Content, Piece
from protocol.publish import publishing
from protocol.schema import decode
from protocol.wire import CHUNK_BYTES
from syncd.delivery.link import Link
from syncd.state import State

INLINE_BYTES = 64 * 1024
# The owner of blobs that were said inside messages, kept until a state needs them or none does.
SAID = "said"


def file_sha256(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes. Raises OSError."""
    digest = hashlib.sha256()
    for block in _read(path, size):
        digest.update(block)
    return digest.hexdigest()


def _read(path: Path, size: int | None, step: int = 1024 * 1024) -> Iterator[bytes]:
    """Yield the bytes of a file, or its first `size`, in blocks of `step`."""
    left = sys.maxsize if size is None else size
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(min(step, left))):
            left -= len(block)
            yield block


class Contents:
    """What is known of contents; the bytes are fetched when they are wanted."""

    def __init__(self, state: State, folder: Path, link: Callable[[], Link]) -> None:
        """`folder` names these contents apart from others of this end, and its disk is used."""
        self._state = state
        self._folder = folder
        self._owner = folder.name
        self._link = link

    def receive(self, content: Content) -> None:
        """Keep what a message says of a content. Raises RefusedError when its blob is another."""
        if content.pieces:
            pieces = json.dumps([asdict(piece) for piece in content.pieces])
            self._note(content.sha256, content.size, pieces)
            return
        if hashlib.sha256(content.blob).hexdigest() != content.sha256:
            raise RefusedError(f"receive content {content.sha256[:80]}", why="its bytes are others")
        self._state.run(
            "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)",
            self._owner,
            content.sha256,
            content.blob,
        )

    def _note(self, sha256: str, size: int, pieces: str) -> None:
        self._state.run("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", sha256, size, pieces)

    def pieces(self, sha256: str) -> tuple[Piece, ...]:
        """Where a content lies on the remote; empty when it lies in no chunk."""
        row = self._state.row("SELECT pieces FROM contents WHERE sha256 = ?", sha256)
        values = json.loads(row[0]) if row else ()
        # Many contents lie in one chunk: its name is kept once.
        return tuple(decode(Piece, {**v, "object": sys.intern(v["object"])}) for v in values)

    def upload(self, path: Path, sha256: str, size: int) -> None:
        """Bring a file's first `size` bytes to the remote as chunks, unless they are there.

        Raises DataError when the file is no longer what its hash says.
        """
        if self.pieces(sha256):
            return
        pieces: list[Piece] = []
        digest = hashlib.sha256()
        for block in _read(path, size, CHUNK_BYTES):
            digest.update(block)
            name = self._link().put_chunk(block)
            pieces.append(Piece(object=name, offset=0, length=len(block)))
        if digest.hexdigest() != sha256:
            raise DataError("send a file", path=path, why="it changed meanwhile")
        self._note(sha256, size, json.dumps([asdict(piece) for piece in pieces]))

    def message(self, path: Path, sha256: str, size: int) -> Content | None:
        """Return the message that brings a file's content; None when the file is another now."""
        pieces = self.pieces(sha256)
        if pieces:
            return Content(sha256=sha256, size=size, pieces=pieces)
        try:
            blob = b"".join(_read(path, size))
        except OSError:
            return None
        if hashlib.sha256(blob).hexdigest() != sha256:
            return None
        self._state.run("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", SAID, sha256, blob)
        return Content(sha256=sha256, size=size, blob=blob)

    def pack_up(self, live: set[str]) -> None:
        """Join contents that were said inside messages into chunks; forget all but the `live`."""
        with self._state.transaction():
            for table, where in (("blobs", "owner = 'said'"), ("contents", "pieces LIKE ?")):
                own = (f'%"object": "{self._link().role[0]}-%',) if table == "contents" else ()
                for (sha256,) in self._state.rows(
                    f"SELECT sha256 FROM {table} WHERE {where}", *own
                ):
                    if sha256 not in live:
                        self._state.run(
                            f"DELETE FROM {table} WHERE sha256 = ? AND {where}", sha256, *own
                        )
        said = self._state.rows("SELECT sha256, LENGTH(data) FROM blobs WHERE owner = ?", SAID)
        group: list[tuple[str, int]] = []
        total = 0
        for sha256, length in said:
            if group and total + int(length) > CHUNK_BYTES:
                self._join(group)
                group, total = [], 0
            group.append((str(sha256), int(length)))
            total += int(length)
        if group:
            self._join(group)

    def _join(self, group: list[tuple[str, int]]) -> None:
        """Put a group of contents into one chunk."""
        blobs = [self._said(sha256) or b"" for sha256, _ in group]
        name = self._link().put_chunk(b"".join(blobs), compress=True)
        at = 0
        with self._state.transaction():
            for (sha256, _), blob in zip(group, blobs, strict=True):
                piece = Piece(object=name, offset=at, length=len(blob))
                at += len(blob)
                self._note(sha256, len(blob), json.dumps([asdict(piece)]))
                self._state.run("DELETE FROM blobs WHERE owner = ? AND sha256 = ?", SAID, sha256)

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

    def objects(self) -> set[str]:
        """Return every chunk that holds a known content, as pieces name them."""
        rows = self._state.rows("SELECT pieces FROM contents")
        return {value["object"] for (text,) in rows for value in json.loads(text)}

    def place(self, sha256: str, target: Path, *, mode: int, size: int) -> None:
        """Publish a content of `size` bytes as a file, fetching it if it is not here.

        Raises RemoteError when it cannot be fetched, DataError when it is nowhere or not whole.
        """
        with publishing(target, mode=0o600) as file:
            self._copy(sha256, file, target, size)
            if sys.platform != "win32":  # there any file that can be written has one mode
                os.fchmod(file.fileno(), mode & 0o777 | 0o600)

    def write(self, sha256: str, target: Path, *, mode: int, size: int) -> None:
        """Like `place`, but neither atomic nor durable: for a folder that is published whole."""
        with open(target, "wb") as file:
            self._copy(sha256, file, target, size)
        target.chmod(mode & 0o777 | 0o600)

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

    def _blocks(self, sha256: str) -> Iterator[bytes]:
        blob = self._state.row(
            "SELECT data FROM blobs WHERE owner = ? AND sha256 = ?", self._owner, sha256
        )
        if blob is not None:
            yield bytes(blob[0])
            return
        pieces = self.pieces(sha256)
        row = self._state.row("SELECT size FROM contents WHERE sha256 = ?", sha256)
        if row is None:
            raise DataError(f"fetch content {sha256}", why="it was never announced")
        if sum(piece.length for piece in pieces) != int(row[0]):
            raise DataError(f"fetch content {sha256}", why="its pieces do not add up")
        yield from self._link().read_pieces(pieces)

    def forget(self, sha256: str) -> None:
        """Drop this end's copy."""
        self._state.run("DELETE FROM blobs WHERE owner = ? AND sha256 = ?", self._owner, sha256)

    def keep_only(self, wanted: set[str]) -> None:
        """Drop this end's copies of all but the contents in `wanted`."""
        kept = self._state.rows("SELECT sha256 FROM blobs WHERE owner = ?", self._owner)
        with self._state.transaction():
            for (sha256,) in kept:
                if sha256 not in wanted:
                    self.forget(str(sha256))

    def room_for(self, size: int) -> bool:
        """Whether `size` bytes fit on this end's disk with a little to spare."""
        return shutil.disk_usage(self._folder).free > size + 64 * 1024 * 1024
