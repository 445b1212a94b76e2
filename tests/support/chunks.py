"""Chunks in memory, in the place of a link: for tests of what is made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from protocol.messages import Piece
from protocol.wire import Role
from syncd.rclone.remote import NotFound


class Chunks:
    """Two ends that share one of these share a remote."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.role = Role.WORKER

    def put_chunk(self, payload: bytes, *, compress: bool = False) -> str:
        name = f"w-000001-00000000/{hashlib.sha256(payload).hexdigest()}"
        self.kept[name] = payload
        return name

    def read_pieces(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            if piece.object not in self.kept:
                raise NotFound("read a chunk", path=piece.object, why="it is not there")
            yield self.kept[piece.object][piece.offset : piece.offset + piece.length]
