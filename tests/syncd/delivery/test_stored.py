"""The controller's word that it has a chunk: only of what is whole on its own disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import RefusedError
from protocol.messages import Content, Piece, Stored
from syncd.delivery.stored import StoredChunks
from syncd.state import State

SHA256 = "0" * 64
WRITER = "w-000001-51b0c7de"


class Laptop:
    """A controller's disk with a remote's folder on it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "remote"
        (self.folder / WRITER).mkdir(parents=True)
        self.state = State(root / "state.db")
        self.stored = StoredChunks(self.state)
        self.count = 0

    def name(self, data: bytes) -> str:
        self.count += 1
        digest = hashlib.sha256(data).hexdigest()
        return f"{WRITER}/{self.count:012d}-chunk-{len(data)}-{digest}"

    def arrive(self, path: str, data: bytes) -> None:
        (self.folder / path).write_bytes(data)

    def expect(self, *paths: str, size: int | None = None) -> None:
        pieces = tuple(Piece(object=path, offset=0, length=1) for path in paths)
        size = len(pieces) if size is None else size
        self.stored.expect(Content(sha256=SHA256, size=size, pieces=pieces))

    def say(self) -> list[str]:
        self.stored.look(self.folder)
        with self.state.transaction():
            return said(self.stored.collect())


def said(messages: Iterator[Stored]) -> list[str]:
    return [path for message in messages for path in message.objects]


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    laptop = Laptop(tmp_path)
    yield laptop
    laptop.state.close()


def test_a_chunk_that_is_whole_here_is_said_once_and_by_each_state(laptop: Laptop) -> None:
    path = laptop.name(b"data")
    laptop.expect(path)
    assert laptop.say() == []
    laptop.arrive(path, b"data")
    assert laptop.say() == [path]
    laptop.expect(path)
    assert laptop.say() == []
    assert said(laptop.stored.restate()) == [path]


@pytest.mark.parametrize("found", [b"da", b"date", b"more data"])
def test_a_chunk_that_is_not_whole_is_not_said(laptop: Laptop, found: bytes) -> None:
    path = laptop.name(b"data")
    laptop.expect(path)
    laptop.arrive(path, found)
    assert laptop.say() == []


def test_a_content_that_is_still_being_sent_is_not_looked_at(laptop: Laptop) -> None:
    path = laptop.name(b"data")
    laptop.arrive(path, b"data")
    laptop.expect(path, size=2)
    assert laptop.say() == []


@pytest.mark.parametrize("path", ["../../key", f"{WRITER}/../../key", f"{WRITER}/status.txt"])
def test_only_chunks_are_looked_at(laptop: Laptop, path: str) -> None:
    with pytest.raises(RefusedError):
        laptop.expect(path)


def test_chunks_that_are_gone_are_forgotten(laptop: Laptop) -> None:
    path = laptop.name(b"data")
    laptop.expect(path)
    laptop.arrive(path, b"data")
    assert laptop.say() == [path]
    (laptop.folder / path).unlink()
    laptop.stored.pack_up(laptop.folder)
    assert said(laptop.stored.restate()) == []


def test_where_the_remote_is_elsewhere_nothing_is_said(laptop: Laptop) -> None:
    laptop.expect(laptop.name(b"data"))
    assert not laptop.stored.look(None)
    laptop.stored.pack_up(None)
    assert said(laptop.stored.collect()) == []
