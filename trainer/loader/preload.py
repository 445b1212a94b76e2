"""Bringing mapped files into the page cache before rows are read from them at random.

All of them in order, when they fit (`preload_shards`); else the rows of the next batches, all at
once and ahead of time (`will_need`), so that the disk has many requests to work on.

Random rows from a cold disk cost a seek each; a sequential read of the same bytes, some 20 times
less. Linux 5.14 and later fill the mapping themselves (`MADV_POPULATE_READ`), with no buffer of
ours: that was the fastest of what was tried (2.0 GB/s where `dd` got 0.6, one thread of reads 1.1
and two 1.5), and a second thread made it slower. Elsewhere the files are read and thrown away.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from protocol.errors import DataError
from trainer.files import refused
from trainer.loader.arrow import READ, Shard, advise

BLOCK = 8 << 20
# Of the memory that is free: the rest is for what others ask for meanwhile.
SHARE = 0.8

_MADV_POPULATE_READ = 22
_ROOT = Path("/sys/fs/cgroup")
# A control group's limit, use, and the name of its reclaimable part: version 2, then version 1.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def preload_shards(shards: Sequence[Shard], stop: Callable[[], bool] = lambda: False) -> bool:
    """Bring the files of `shards` into the page cache, in order; return whether all of it was.

    Does nothing when they do not fit together in the memory that is available. `stop` is asked
    before each 8 MiB. Takes no memory beyond the page cache (and page tables, 2 MB a GB), and lets
    other threads run. Raises DataError when a file cannot be read or has been cut short.
    """
    if sum(shard.nbytes for shard in shards) > SHARE * available_memory():
        return False
    return all(_preload(shard, stop) for shard in shards)


def _preload(shard: Shard, stop: Callable[[], bool]) -> bool:
    shard.check_size()
    # The kernel heeds this also here: a mapping advised as random is filled page by page.
    advise(shard.mapping, "MADV_SEQUENTIAL")
    try:
        for begin in range(0, shard.nbytes, BLOCK):
            if stop():
                return False
            size = min(BLOCK, shard.nbytes - begin)
            if not _populate(shard.buffer.address + begin, size):
                _read(shard.path, begin, size)
    finally:
        advise(shard.mapping, "MADV_NORMAL")
    return True


def will_need(begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Ask the system to read the pages of mapped memory at `begins` (n,), each of `sizes` bytes.

    Returns before they are read, and asks for nothing where the system has no such advice.
    """
    madvise = _madvise()
    if madvise is None:
        return
    pages = begins & -mmap.PAGESIZE
    for page, size in zip(pages.tolist(), (begins - pages + sizes).tolist(), strict=True):
        madvise(page, size, mmap.MADV_WILLNEED)


def available_memory() -> int:
    """Return the bytes that can be had without swapping, within the control group's limit."""
    available = int(psutil.virtual_memory().available)
    for limit, used, statistics, reclaimable in _GROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # not limited, or not in this way
            lines = (_ROOT / statistics).read_text("ascii").splitlines()
            cache = int(dict(line.split() for line in lines)[reclaimable])
            free = int((_ROOT / limit).read_text("ascii")) - int((_ROOT / used).read_text("ascii"))
            return min(available, free + cache)
    return available


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's madvise, called without the GIL (mmap's own method keeps it)."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int

    def call(address: int, size: int, advice: int) -> int:
        return int(function(address, size, advice))

    return call


def _populate(address: int, size: int) -> bool:
    """Fault in the pages there; False where the system cannot, or the file could not be read."""
    madvise = _madvise()
    return madvise is not None and madvise(address, size, _MADV_POPULATE_READ) == 0


def _read(path: Path, begin: int, size: int) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            got = file.readinto(bytearray(size))
    except OSError as error:
        raise refused(READ, path, error) from error
    if got != size:
        why = f"it was cut short or replaced while it was read: no {size} bytes at {begin}"
        raise DataError(READ, path=path, why=why)
