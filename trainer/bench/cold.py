"""An epoch from a cold disk, of data that fits in memory, beside reading the files in order.

Before each measure the files are put out of the page cache, which the system does for no page
that any process has mapped and touched: nobody else may have them open.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.bench import Figure
from protocol.errors import DataError
from trainer.bench.batches import BUDGET
from trainer.bench.interleaved import medians, seconds
from trainer.loader import Loader, Padded, open_rows

CHUNK = 8 * 1024 * 1024
PROBES_APART = 1024 * 1024
ROUNDS = 3
STILL_CACHED = 0.05


def figures(shards: Sequence[Path]) -> list[Figure]:
    """Measure an epoch, preloaded or not. Nothing where a cache cannot be emptied."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return []
    ways: dict[str, Callable[[], None]] = {
        "loader": lambda: _epoch(shards, preload=True),
        "read in order": lambda: _read(shards),
        "preloaded before": lambda: _preloaded(shards),
        "as it is mapped": lambda: _epoch(shards, preload=False),
    }
    found = medians({name: _cold(shards, way) for name, way in ways.items()}, ROUNDS)
    ours = found.pop("loader")
    ratio = Figure(
        name="cold: an epoch, against reading the files in order",
        value=ours / found["read in order"],
        unit="ratio",
        goal="<= 1.3",
    )
    return [ratio, *Figure(name="cold: an epoch", value=ours, unit="s").beside(found)]


def _cold(shards: Sequence[Path], way: Callable[[], None]) -> Callable[[], float]:
    def measured() -> float:
        put_out(shards)
        return seconds(way)

    return measured


def put_out(paths: Sequence[Path]) -> None:
    """Put files out of the page cache. Raises DataError when more than a few pages stay there."""
    gc.collect()  # loaders that are over may still hold the files mapped, in cycles
    there = []
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not yet written cannot be put out
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            there.append(cached(file.fileno()))
    if (share := sum(there) / len(there)) > STILL_CACHED:
        why = f"{share:.0%} of the files stays in memory: somebody has them mapped"
        raise DataError("measure a cold disk", path=paths[0].parent, why=why)


def cached(descriptor: int) -> float:
    """Return the share of a file that is in the page cache, by a byte of each megabyte."""
    places = range(0, os.fstat(descriptor).st_size, PROBES_APART)
    buffer, there = bytearray(1), 0
    for at in places:
        with contextlib.suppress(BlockingIOError):
            there += os.preadv(descriptor, [buffer], at, os.RWF_NOWAIT)
    return there / max(len(places), 1)


def _read(shards: Sequence[Path]) -> None:
    buffer = bytearray(CHUNK)
    for path in shards:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _preloaded(shards: Sequence[Path]) -> None:
    open_rows(shards).preload()
    _epoch(shards, preload=False)


def _epoch(shards: Sequence[Path], *, preload: bool) -> None:
    for _ in Loader(open_rows(shards), Padded(budget=BUDGET), preload=preload):
        pass
