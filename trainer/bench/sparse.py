"""100 GB of shards that take next to no space: how long they take to open.

The shards are Arrow IPC streams with zeros for tokens, which a sparse file does not store. A
stream has no directory at its end, so to open one is to walk all its messages: the slower format.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from protocol.bench import Figure
from trainer.bench.corpus import SCHEMA
from trainer.bench.interleaved import medians, seconds
from trainer.files import writing
from trainer.loader import open_rows

SHARDS = 10
BATCHES_A_SHARD = 61  # 10.2 GB a shard
ROWS_A_BATCH = 4096
TOKENS_A_ROW = 8192
BLOCK = 4096
ROUNDS = 3
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def write_sparse(
    folder: Path, *, shards: int, batches: int, rows: int = ROWS_A_BATCH
) -> list[Path]:
    """Write so many shards of so many record batches of zeros."""
    schema = SCHEMA.serialize().to_pybytes()
    body, size = _stored(rows)
    paths = [folder / f"{shard:05d}.arrow" for shard in range(shards)]
    for path in paths:
        with writing("write sparse shards", path), open(path, "wb") as file:
            file.write(schema)
            for batch in range(batches):
                for at, stored in body:
                    file.seek(len(schema) + batch * size + at)
                    file.write(stored)
            file.seek(len(schema) + batches * size)
            file.write(_END_OF_STREAM)
    return paths


def _stored(rows: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return one record batch's message as its blocks that are not zero, and its size in bytes."""
    offsets = np.arange(0, (rows + 1) * TOKENS_A_ROW, TOKENS_A_ROW, dtype=np.int32)
    columns = [
        pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], dtype))
        for dtype in (np.int32, np.int8)
    ]
    message = np.frombuffer(pa.record_batch(columns, schema=SCHEMA).serialize(), dtype=np.uint8)
    blocks = ((at, message[at : at + BLOCK]) for at in range(0, len(message), BLOCK))
    return [(at, block.tobytes()) for at, block in blocks if block.any()], len(message)


def figures(folder: Path) -> list[Figure]:
    """Measure how long 100 GB take to open."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        shards = write_sparse(Path(name), shards=SHARDS, batches=BATCHES_A_SHARD)
        source = open_rows(shards)
        opening = medians({"open": lambda: seconds(lambda: open_rows(shards))}, ROUNDS)["open"]
        told = f"{source.nbytes / 1e9:.0f} GB in {SHARDS} shards, {len(source):,} rows"
        return [Figure(name=f"open: {told}", value=opening, unit="s", goal="< 1")]
