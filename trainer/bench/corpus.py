"""The work of the loader's benchmark: sequences of random tokens, as Arrow IPC shards.

Lengths are lognormal with a median of 726, clipped to 16 and 8192, which is about what chat data
for fine-tuning looks like. A row has `ids`, int32, and `mask`, int8 of the same length. The first
token of a row is the row's number, so that whoever gets a row, in whatever order, knows which it
is; `sums` says what its content must add up to.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protocol.publish import publish_bytes
from trainer.files import writing

MEDIAN = 726
SIGMA = 0.8
SHORTEST = 16
LONGEST = 8192
VOCABULARY = 32_000
SHARDS = 8
ROWS_A_BATCH = 1000  # what `datasets` writes by default
BYTES_A_TOKEN = 5  # an int32 and an int8
WHAT = "write the benchmark's corpus"

# What each position of a row counts in the row's sum: odd, so that no change of one value is lost.
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, (2, LONGEST), dtype=np.uint64) * 2 + 1


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sequences on disk. `lengths` (rows,) in tokens; `sums` (rows,) as `padded_sums` has them."""

    folder: Path
    lengths: NDArray[np.int32]
    sums: NDArray[np.uint64]

    @property
    def shards(self) -> list[Path]:
        """The Arrow IPC files, in the order of their rows."""
        return sorted(self.folder.glob("*.arrow"))

    @property
    def rows(self) -> int:
        return len(self.lengths)


def padded_sums(ids: NDArray[np.int32], mask: NDArray[np.int8]) -> NDArray[np.uint64]:
    """Return the sum (n,) of each row of a padded batch (n, longest), whatever its padding with 0.

    Modulo 2**64; a value that is wrong, misplaced or left where padding should be changes it.
    """
    width = ids.shape[1]
    found = (
        ids.astype(np.uint64) @ _WEIGHTS[0, :width] + mask.astype(np.uint64) @ _WEIGHTS[1, :width]
    )
    return np.asarray(found, dtype=np.uint64)


def open_corpus(folder: Path, *, rows: int, seed: int = 0) -> Corpus:
    """Return the corpus of `rows` rows of `seed` in `folder`, written there when it is missing.

    Raises DataError when it cannot be written.
    """
    with writing(WHAT, folder):
        found = prepared(folder / f"sequences-{rows}-{seed}", lambda to: _write(to, rows, seed))
        with np.load(found / "rows.npz") as kept:
            return Corpus(folder=found, lengths=kept["lengths"], sums=kept["sums"])


def prepared(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, built by `build` in a neighbour that is renamed once it is whole."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        build(partial)
        partial.rename(folder)
    return folder


def draw_lengths(rows: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Draw the lengths (rows,) of sequences, in tokens."""
    drawn = rng.lognormal(np.log(MEDIAN), SIGMA, rows)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int32)


def _write(folder: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(rows, rng)
    sums = np.empty(rows, dtype=np.uint64)
    # A shard is larger than any batch, so that memcpy finds all of one in one piece.
    shards = max(min(SHARDS, rows // ROWS_A_BATCH), 1)
    bounds = np.linspace(0, rows, shards + 1).astype(int)
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        path = folder / f"{shard:05d}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for first in range(start, stop, ROWS_A_BATCH):
                part = slice(first, min(first + ROWS_A_BATCH, stop))
                batch, sums[part] = _record_batch(first, lengths[part], rng)
                writer.write_batch(batch)
    kept = io.BytesIO()
    np.savez(kept, lengths=lengths, sums=sums)
    publish_bytes(folder / "rows.npz", kept.getvalue())


SCHEMA = pa.schema([("ids", pa.list_(pa.int32())), ("mask", pa.list_(pa.int8()))])


def _record_batch(
    first: int, lengths: NDArray[np.int32], rng: np.random.Generator
) -> tuple[pa.RecordBatch, NDArray[np.uint64]]:
    """Return the rows from number `first` on, and the sum of each."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(1, VOCABULARY, offsets[-1], dtype=np.int32)
    mask = rng.integers(0, 2, offsets[-1], dtype=np.int8)
    ids[offsets[:-1]] = np.arange(first, first + len(lengths))
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    worth = ids.astype(np.uint64) * _WEIGHTS[0, places]
    worth += mask.astype(np.uint64) * _WEIGHTS[1, places]
    columns = [pa.ListArray.from_arrays(offsets, values) for values in (ids, mask)]
    batch = pa.record_batch(columns, schema=SCHEMA)
    return batch, np.add.reduceat(worth, offsets[:-1])


def record_batches(corpus: Corpus) -> Iterator[pa.RecordBatch]:
    """Yield the corpus' record batches in the order of their rows, as views of the mapped files."""
    for path in corpus.shards:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        yield from (reader.get_batch(each) for each in range(reader.num_record_batches))


def views(corpus: Corpus) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int8]]]:
    """Yield each row's `ids` and `mask` (length,), read-only views, in order."""
    for batch in record_batches(corpus):
        ids, mask = (batch.column(name).flatten().to_numpy() for name in ("ids", "mask"))
        offsets = batch.column("ids").offsets.to_numpy()
        for start, stop in pairwise(offsets):
            yield ids[start:stop], mask[start:stop]
