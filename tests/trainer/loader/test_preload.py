"""Tests of trainer/loader/preload.py, on real files whose pages are thrown out of the cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from arrow_files import write
from waiting import eventually

from protocol.errors import DataError
from trainer.loader import preload
from trainer.loader.arrow import Shard, open_shard


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """Two files of two and a half (smaller) blocks each, whose pages are not in the cache."""
    monkeypatch.setattr(preload, "BLOCK", 2**20)
    batch = pa.record_batch({"x": np.arange(preload.BLOCK * 5 // 2 // 8)})
    opened = [open_shard(write(tmp_path / name, batch)) for name in "ab"]
    for shard in opened:
        with open(shard.path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return opened


def cached(shard: Shard) -> float:
    """The share of the file's pages in the page cache. (A read that may not wait reads ahead.)"""
    pages = (ctypes.c_ubyte * -(-shard.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(shard.buffer.address, shard.nbytes, pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.fixture
def cold(shards: list[Shard]) -> list[Shard]:
    """The same, where pages do leave the cache (not where files live in memory)."""
    if max(map(cached, shards)) > 0.1:
        pytest.skip("files stay in the page cache here")
    return shards


@pytest.mark.parametrize("kernel_can", [True, False])
def test_all_files_are_in_the_page_cache_afterwards(
    cold: list[Shard], monkeypatch: pytest.MonkeyPatch, kernel_can: bool
) -> None:
    if not kernel_can:
        monkeypatch.setattr(preload, "_populate", lambda address, size: False)
    before = pa.total_allocated_bytes()
    assert preload.preload_shards(cold)
    assert [cached(shard) for shard in cold] == [1, 1]
    assert pa.total_allocated_bytes() == before


def test_pages_asked_for_ahead_come_without_a_touch_and_no_others(cold: list[Shard]) -> None:
    begin = cold[0].buffer.address
    half = np.array([begin + 5], np.int64), np.array([cold[0].nbytes // 2], np.int64)
    preload.will_need(*half)
    eventually(lambda: cached(cold[0]) >= 0.5)
    assert cached(cold[1]) < 0.1


def test_it_stops_when_asked_to_with_blocks_in_their_order(
    shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def populate(address: int, size: int) -> bool:
        read.append(address)
        return True

    monkeypatch.setattr(preload, "_populate", populate)
    assert not preload.preload_shards(shards, lambda: len(read) == 4)
    first, second = (shard.buffer.address for shard in shards)
    assert read == [first, first + preload.BLOCK, first + 2 * preload.BLOCK, second]


def test_what_does_not_fit_in_memory_is_not_touched(
    shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "available_memory", lambda: shards[0].nbytes * 2)
    monkeypatch.setattr(preload, "_populate", lambda address, size: pytest.fail("was read"))
    assert not preload.preload_shards(shards)
    assert preload.preload_shards(shards[:0])


def test_a_file_cut_short_is_an_error_and_not_the_end_of_the_process(shards: list[Shard]) -> None:
    os.truncate(shards[1].path, preload.BLOCK)
    with pytest.raises(DataError, match="b: it was cut short"):
        preload.preload_shards(shards)
    with pytest.raises(DataError, match="b: it was cut short or replaced"):
        preload._read(shards[1].path, preload.BLOCK - 10, 20)
    shards[1].path.unlink()
    with pytest.raises(DataError, match="b: No such file"):
        preload._read(shards[1].path, 0, 20)


def test_memory_is_that_of_the_control_group_where_it_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "_ROOT", tmp_path)
    assert preload.available_memory() > 2**26
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert preload.available_memory() == 500000
    (tmp_path / "memory.max").write_text("max\n")
    assert preload.available_memory() > 2**26
