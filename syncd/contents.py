"""Contents: bytes by their SHA-256, at this end and on the remote.

Small ones travel inside the message that names them, larger ones as chunks. `.syncd/content/`
holds what arrived and what is still to be used here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.messages import Content, Piece
from protocol.publish import publish_bytes, publishing
from protocol.schema import decode
from protocol.wire import CHUNK_BYTES
from syncd.link import Link
from syncd.state import State

INLINE_BYTES = 64 * 1024


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Contents:
    """What is known of contents; the bytes are fetched when they are wanted."""

    def __init__(self, state: State, folder: Path, link: Callable[[], Link]) -> None:
        self._state = state
        self._folder = folder
        self._link = link

    def path(self, sha256: str) -> Path:
        """Where a content lies, or would lie, at this end."""
        return self._folder / sha256

    def receive(self, content: Content) -> None:
        """Keep what a message says of a content. Raises RefusedError when its blob is another."""
        if content.pieces:
            pieces = json.dumps([asdict(piece) for piece in content.pieces])
            self._note(content.sha256, content.size, pieces)
            return
        if hashlib.sha256(content.blob).hexdigest() != content.sha256:
            raise RefusedError(f"receive content {content.sha256[:80]}", why="its bytes are others")
        if not self.path(content.sha256).exists():
            publish_bytes(self.path(content.sha256), content.blob)

    def _note(self, sha256: str, size: int, pieces: str) -> None:
        self._state.run("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", sha256, size, pieces)

    def pieces(self, sha256: str) -> tuple[Piece, ...]:
        """Where a content lies on the remote; empty when it lies in no chunk."""
        row = self._state.row("SELECT pieces FROM contents WHERE sha256 = ?", sha256)
        return tuple(decode(Piece, value) for value in json.loads(row[0])) if row else ()

    def upload(self, path: Path, sha256: str) -> None:
        """Bring a file's bytes to the remote as chunks, unless they are there.

        Raises DataError when the file is no longer what its hash says.
        """
        if self.pieces(sha256):
            return
        pieces: list[Piece] = []
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
                size += len(block)
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
            blob = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(blob).hexdigest() != sha256:
            return None
        return Content(sha256=sha256, size=size, blob=blob)

    def place(self, sha256: str, target: Path, *, mode: int) -> None:
        """Publish a content as a file, fetching it if it is not here.

        Raises RemoteError when it cannot be fetched, DataError when it is nowhere or not whole.
        """
        digest = hashlib.sha256()
        with publishing(target, mode=mode | 0o600) as file:
            for block in self._blocks(sha256):
                digest.update(block)
                file.write(block)
            if digest.hexdigest() != sha256:
                raise DataError(
                    "fetch a file", path=target, why="its bytes are not those announced"
                )
        target.chmod(mode & 0o777 | 0o600)

    def _blocks(self, sha256: str) -> Iterator[bytes]:
        if self.path(sha256).exists():
            with open(self.path(sha256), "rb") as file:
                while block := file.read(1024 * 1024):
                    yield block
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
        self.path(sha256).unlink(missing_ok=True)

    def keep_only(self, wanted: set[str]) -> None:
        """Drop this end's copies of all but the contents in `wanted`."""
        for entry in os.scandir(self._folder):
            if entry.name not in wanted:
                os.unlink(entry.path)

    def room_for(self, size: int) -> bool:
        """Whether `size` bytes fit on this end's disk with a little to spare."""
        return shutil.disk_usage(self._folder).free > size + 64 * 1024 * 1024
