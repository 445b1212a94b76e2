"""Chunks in a folder, in the place of a link: for tests of what is made of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from protocol.messages import Piece
from protocol.wire import Role, Writer
from syncd.delivery.chunks import Draft
from syncd.rclone.remote import NotFound


class Chunks:
    """Two ends that share one of these share a remote."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.role = Role.WORKER
        self.chunks = self
        self.count = 0

    def begin(self, again: str = "") -> Draft:
        self.count += 1
        seq = int(again.partition("/")[2].partition("-")[0]) if again else self.count
        beside = Path(tempfile.gettempdir()) / "chunk"
        return Draft(beside, Writer(1, "00000000", self.role), seq, b"")

    def send(self, draft: Draft) -> str:
        with draft:
            self.kept[draft.name] = draft.file.read_bytes()
        return draft.name

    def send_all(self, drafts: Iterable[Draft]) -> Iterator[str]:
        return map(self.send, drafts)

    def put_chunk(self, payload: bytes, *, compress: bool = False) -> str:
        draft = self.begin()
        draft.write(payload)
        return self.send(draft)

    def read_pieces(self, pieces: Iterable[Piece], *, trusting: bool = False) -> Iterator[bytes]:
        for piece in pieces:
            if piece.object not in self.kept:
                raise NotFound("read a chunk", path=piece.object, why="it is not there")
            yield self.kept[piece.object][piece.offset : piece.offset + piece.length]
