"""Rows of one size: clips of 2048 float32, 8 KiB each, in random order, beside memcpy.

A clip's first value is its row's number. The files are those of a pool as large as the largest
that there is, 123,340 clips, which is 1 GB.
"""

from __future__ import annotations

import time
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protocol.bench import Figure
from protocol.errors import DataError
from trainer.bench.corpus import prepared
from trainer.bench.interleaved import ROUNDS, mapped, medians, pieces
from trainer.files import writing
from trainer.loader import Fixed, Kernel, Loader, open_rows
from trainer.loader.rows import Rows as Source

FULL = 123_340
QUICK = 12_334
VALUES = 2048
CLIPS_A_BATCH = 32  # 65,536 values
SHARDS = 4
ROWS_A_BATCH = 1000
TIMED = 256
WARM = 16
NBYTES = CLIPS_A_BATCH * VALUES * 4


def write_clips(folder: Path, rows: int) -> list[Path]:
    """Return the shards of `rows` clips in `folder`, written there when they are missing."""
    with writing("write the benchmark's clips", folder):
        found = prepared(folder / f"clips-{rows}", lambda to: _write(to, rows))
        return sorted(found.glob("*.arrow"))


def _write(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    schema = pa.schema([("clip", pa.list_(pa.float32(), VALUES))])
    for shard, (start, stop) in enumerate(pairwise(np.linspace(0, rows, SHARDS + 1).astype(int))):
        path = str(folder / f"{shard:05d}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for first in range(start, stop, ROWS_A_BATCH):
                clips = rng.random((min(ROWS_A_BATCH, stop - first), VALUES), dtype=np.float32)
                clips[:, 0] = np.arange(first, first + len(clips))
                column = pa.FixedSizeListArray.from_arrays(clips.reshape(-1), VALUES)
                writer.write_batch(pa.record_batch([column], schema=schema))


def figures(shards: list[Path], kernels: list[Kernel]) -> list[Figure]:
    """Measure memcpy and our loader. Raises DataError when a clip is not what was written."""
    source = open_rows(shards)
    source.preload()
    maps = mapped(shards)
    for kernel in kernels:
        _check(source, kernel)
    loaders = {f"{kernel}": lambda kernel=kernel: _loader_s(source, kernel) for kernel in kernels}
    found = medians({"memcpy": lambda: _memcpy_s(maps), **loaders}, ROUNDS)
    floor = found.pop("memcpy")
    return [
        figure
        for kernel, spent in found.items()
        for figure in (
            Figure(
                name=f"clips: loader, {kernel}, against memcpy",
                value=spent / floor,
                unit="ratio",
                goal="<= 3",
            ),
            Figure(
                name=f"clips: loader, {kernel}, {CLIPS_A_BATCH} clips of 8 KiB",
                value=spent * 1000,
                unit="ms a batch",
                baseline=floor * 1000,
                baseline_name="memcpy",
            ),
        )
    ]


def _memcpy_s(maps: list[NDArray[np.uint8]]) -> float:
    """Return the seconds that a plain copy of a batch's bytes takes, from random places."""
    copied = pieces(maps, [NBYTES] * TIMED, np.random.default_rng())
    buffer = np.zeros(NBYTES, dtype=np.uint8)
    start = time.perf_counter()
    for piece in copied:
        np.copyto(buffer, piece)
    return (time.perf_counter() - start) / len(copied)


def _loader_s(source: Source, kernel: Kernel) -> float:
    """Return the seconds that our loader takes for a batch, its start left out."""
    seed = int(np.random.default_rng().integers(2**31))
    loader = Loader(source, Fixed(size=CLIPS_A_BATCH), seed=seed, kernel=kernel, preload=False)
    timed = min(TIMED, len(loader) - 2 * WARM)
    batches = iter(loader)
    try:
        for _ in islice(batches, WARM):
            pass
        start = time.perf_counter()
        for _ in islice(batches, timed):
            pass
        return (time.perf_counter() - start) / timed
    finally:
        loader.close()


def _check(source: Source, kernel: Kernel) -> None:
    column = source.columns["clip"]
    loader = Loader(source, Fixed(size=CLIPS_A_BATCH), kernel=kernel)
    try:
        for batch in islice(loader, WARM):
            clips = batch["clip"].numpy()
            for clip, row in zip(clips, batch.rows, strict=True):
                if clip[0] != row or not np.array_equal(clip, column.view(int(row))):
                    raise DataError("check what our loader yields", why=f"clip {row} is not it")
    finally:
        loader.close()
