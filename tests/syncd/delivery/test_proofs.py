"""What vouches for a chunk on a real remote, and how a damaged one is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import Place

from protocol.checkpoints import Proof
from protocol.wire import Role, Sealer, Writer
from syncd.delivery import proofs as proofs_module
from syncd.delivery.chunks import Chunks
from syncd.delivery.keyring import Keyring
from syncd.delivery.proofs import Proofs, proof_to_seek
from syncd.rclone.profiles import BRIDGE
from syncd.state import State

WRITER = Writer(1, "51b0c7de", Role.WORKER)
# The type of each server's remote → what proves a chunk there.
WAYS = {"webdav": Proof.READ_BACK}


class Bench:
    """Chunks of a worker, and the proofs of them, on a remote."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.state = State(folder / "state.db")
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.chunks = Chunks(
            remote=lambda: place.remote,
            state=self.state,
            keys=Keyring(self.state, Sealer(folder="unsealed"), None),
            writer=lambda: WRITER,
            scratch=self.scratch,
            noting=True,
        )
        self.state.put("chunk_seq", 0)
        self.proofs = Proofs(self.state, lambda: place.remote, self.scratch)

    def file(self, chunk: str) -> Path:
        """The chunk as it lies at the remote."""
        (found,) = self.place.root.rglob(chunk.rpartition("/")[2])
        return found

    def change(self, chunk: str, data: bytes) -> None:
        found = self.file(chunk)
        found.unlink()
        found.write_bytes(data)


@pytest.fixture
def bench(place: Place, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(place, tmp_path)
    yield bench
    bench.state.close()


def test_a_chunk_is_proved_by_the_hash_of_the_remote_or_else_read_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs_module, "PATIENCE_SECONDS", 0.0)
    chunks = [bench.chunks.put(os.urandom(100_000)) for _ in range(2)]
    assert bench.proofs.check(chunks) == set()
    way = WAYS.get(bench.place.remote.kind(), Proof.HASH)
    assert [found and found[0] for found in map(bench.proofs.of, chunks)] == [way, way]
    assert list(bench.scratch.iterdir()) == []


def _flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.parametrize("spoil", [_flipped, lambda body: body[:-7]], ids=["flipped", "torn"])
def test_a_chunk_that_is_not_as_it_was_sent_is_damaged_and_stays_unproved(
    bench: Bench, spoil: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs_module, "PATIENCE_SECONDS", 0.0)
    good, bad = (bench.chunks.put(os.urandom(100_000)) for _ in range(2))
    bench.change(bad, spoil(bench.file(bad).read_bytes()))
    assert bench.proofs.check([good, bad]) == {bad}
    assert bench.proofs.of(bad) is None
    assert bench.proofs.of(good) is not None


def test_a_chunk_that_is_not_there_is_neither_proved_nor_damaged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs_module, "PATIENCE_SECONDS", 0.0)
    kept, chunk = bench.chunks.put(b"kept"), bench.chunks.put(b"gone")
    bench.file(chunk).unlink()
    assert bench.proofs.check([kept, chunk]) == set()
    assert bench.proofs.of(chunk) is None


def test_what_is_not_needed_any_more_is_forgotten(bench: Bench) -> None:
    chunks = [bench.chunks.put(b"one"), bench.chunks.put(b"two")]
    bench.proofs.note([*chunks, "c-000001-7f3a9c02/of-another"], Proof.STORED)
    bench.proofs.keep_only(chunks[:1])
    assert bench.state.rows("SELECT chunk FROM sums") == [(chunks[0],)]


def test_the_first_proof_of_a_chunk_stays(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    proofs = Proofs(state, lambda: pytest.fail("the remote was asked"), tmp_path)
    proofs.note(["a"], Proof.STORED)
    first = proofs.of("a")
    proofs.note(["a"], Proof.READ_BACK)
    assert proofs.of("a") == first
    assert proofs.check(["a"]) == set()
    state.close()


@pytest.mark.parametrize(
    ("hashed", "vouched", "waited", "proof"),
    [
        (True, True, 0.0, Proof.HASH),
        (True, False, 0.0, Proof.HASH),
        (False, True, 0.0, None),
        (False, True, proofs_module.PATIENCE_SECONDS, Proof.READ_BACK),
        (False, False, 0.0, Proof.READ_BACK),
    ],
)
def test_the_cheapest_proof_that_is_to_be_had_is_sought(
    hashed: bool, vouched: bool, waited: float, proof: Proof | None
) -> None:
    assert proof_to_seek(hashed=hashed, vouched=vouched, waited=waited) is proof


def test_over_a_bridge_the_word_of_the_controller_is_waited_for() -> None:
    assert BRIDGE.vouched
