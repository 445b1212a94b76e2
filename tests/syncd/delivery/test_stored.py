"""What a controller says of the worker's chunks that lie on its own disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import Content, DropFile, Piece, PutFile, Stored
from syncd.delivery.contents import Contents
from syncd.delivery.files import RemoteFiles
from syncd.delivery.stored import StoredChunks
from syncd.state import State

RUN = "store/checkpoints/pretrain.0001.7f3a"
WORKER = "w-000001-51b0c7de"


class Laptop:
    """A controller that has the remote on its disk, and what a worker brought there."""

    def __init__(self, folder: Path) -> None:
        self.remote = folder / "remote"
        (self.remote / WORKER).mkdir(parents=True)
        self.state = State(folder / "state.db")
        contents = Contents(self.state, folder, lambda: pytest.fail("the link was used"))
        self.files = RemoteFiles(self.state, folder, contents, wanted=lambda path: False)
        self.stored = StoredChunks(self.state)
        self.count = 0

    def arrive(self, path: str, body: bytes) -> str:
        """Let a worker put a file, in a chunk of its own; return the chunk's name."""
        self.count += 1
        digest = hashlib.sha256(body).hexdigest()
        chunk = f"{WORKER}/{self.count:012d}-chunk-{len(body)}-{digest}"
        (self.remote / chunk).write_bytes(body)
        piece = Piece(object=chunk, offset=0, length=len(body))
        self.files.apply(Content(sha256=digest, size=len(body), pieces=(piece,)))
        self.files.apply(PutFile(path=path, size=len(body), mode=0o644, sha256=digest))
        return chunk

    def said(self) -> list[Stored]:
        self.stored.look(self.remote)
        with self.state.transaction():
            return list(self.stored.collect())


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    laptop = Laptop(tmp_path)
    yield laptop
    laptop.state.close()


def test_each_chunk_of_a_checkpoint_is_said_once_and_again_in_a_state(laptop: Laptop) -> None:
    first = laptop.arrive(f"{RUN}/1.pt", b"one")
    assert laptop.said() == [Stored(chunks=(first,))]
    second = laptop.arrive(f"{RUN}/2.pt", b"two")
    assert laptop.said() == [Stored(chunks=(second,))]
    assert laptop.said() == []
    assert list(laptop.stored.restate()) == [Stored(chunks=(first, second))]


def test_what_is_damaged_missing_or_no_checkpoint_is_not_said(laptop: Laptop) -> None:
    torn = laptop.arrive(f"{RUN}/1.pt", b"one")
    (laptop.remote / torn).write_bytes(b"on")
    (laptop.remote / laptop.arrive(f"{RUN}/2.pt", b"two")).unlink()
    laptop.arrive("in/artifacts/pretrain.0001.7f3a/a.bin", b"three")
    laptop.arrive("store/champion/a.bin", b"four")
    assert laptop.said() == []
    (laptop.remote / torn).write_bytes(b"one")
    assert laptop.said() == [Stored(chunks=(torn,))]


def test_what_the_worker_has_dropped_is_forgotten(laptop: Laptop) -> None:
    laptop.arrive(f"{RUN}/1.pt", b"one")
    laptop.said()
    laptop.files.apply(DropFile(path=f"{RUN}/1.pt"))
    second = laptop.arrive(f"{RUN}/2.pt", b"two")
    assert laptop.said() == [Stored(chunks=(second,))]
    assert list(laptop.stored.restate()) == [Stored(chunks=(second,))]


def test_what_was_found_and_not_said_is_said_after_a_restart(laptop: Laptop) -> None:
    first = laptop.arrive(f"{RUN}/1.pt", b"one")
    assert laptop.stored.look(laptop.remote)
    assert list(laptop.stored.restate()) == []
    assert list(StoredChunks(laptop.state).collect()) == [Stored(chunks=(first,))]
