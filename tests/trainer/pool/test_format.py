"""Tests of trainer/pool/format.py and trainer/pool/manifest.py."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from protocol.errors import DataError, UsageError
from trainer.hashing import file_sha256
from trainer.pool.build import ClipTable, write_pool
from trainer.pool.format import Pool, open_pool, pool_schema
from trainer.pool.manifest import MANIFEST

SHARD = "pool-00001-of-00004.arrow"


@pytest.fixture
def copy(pool_path: Path, tmp_path: Path) -> Path:
    """A copy of the pool that a test may damage."""
    return Path(shutil.copytree(pool_path, tmp_path / "copy"))


def rewrite(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` replace a shard, and make the manifest agree with its size and SHA-256."""
    path = folder / SHARD
    write(path)
    manifest = json.loads((folder / MANIFEST).read_text())
    entry = next(e for e in manifest["shards"] if e["name"] == SHARD)
    entry |= {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_clips_come_in_the_order_asked_for_across_shards(pool: Pool) -> None:
    whole = pool.clips(np.arange(pool.rows))
    assert whole.shape == (2249, 128)
    assert whole.dtype == np.float32
    rows = np.random.default_rng(0).integers(0, pool.rows, 500)
    assert (pool.clips(rows) == whole[rows]).all()
    assert pool.clips(np.empty(0, dtype=np.int64)).shape == (0, 128)


def test_the_clips_held_are_views_of_the_mapped_file_and_not_copies(pool_path: Path) -> None:
    before = pa.total_allocated_bytes()
    opened = open_pool(pool_path)
    for chunk in opened._chunks:
        assert not chunk.clips.flags.owndata
        assert not chunk.clips.flags.writeable
    assert pa.total_allocated_bytes() - before < 64 * 1024


def test_columns_agree_with_each_other(pool: Pool) -> None:
    for row in (0, 777, 2248):
        corpus, split, _ = str(pool.clip_id[row]).rsplit("-", 2)
        assert (pool.corpus[row], pool.split[row]) == (corpus, split)
        assert pool.classes[pool.class_ids[row]] == f"{pool.corpus[row]}/{pool.label[row]}"
    assert len(pool.classes) == 33
    assert pool.classes == tuple(sorted(pool.classes))


def test_a_row_that_is_not_there_is_refused(pool: Pool) -> None:
    for row in (-1, pool.rows):
        with pytest.raises(UsageError, match="between 0 and 2248"):
            pool.clips(np.array([row]))


def test_a_pool_opens_by_its_folder_or_its_manifest(pool_path: Path) -> None:
    assert open_pool(pool_path / MANIFEST).content_hash == open_pool(pool_path).content_hash


def cut_short(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1000])


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / SHARD).write_bytes(bytes(data))


def remove(folder: Path) -> None:
    (folder / SHARD).unlink()


def as_parquet(folder: Path) -> None:
    path = folder / SHARD
    contents = pa.ipc.open_file(path).read_all()
    rewrite(folder, lambda path: pa.parquet.write_table(contents, path))


def as_text(folder: Path) -> None:
    rewrite(folder, lambda path: path.write_text("corpus,label\n"))


def broken_footer(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    rewrite(folder, lambda path: path.write_bytes(data[:2000]))


def other_columns(folder: Path) -> None:
    contents = pa.table({"x": [1, 2]})

    def write(path: Path) -> None:
        with pa.ipc.new_file(path, contents.schema) as writer:
            writer.write_table(contents)

    rewrite(folder, write)


def other_length(folder: Path) -> None:
    schema = pool_schema(64)

    def write(path: Path) -> None:
        with pa.ipc.new_file(path, schema) as writer:
            writer.write_table(schema.empty_table())

    rewrite(folder, write)


def fewer_rows(folder: Path) -> None:
    contents = pa.ipc.open_file(folder / SHARD).read_all()

    def write(path: Path) -> None:
        with pa.ipc.new_file(path, contents.schema) as writer:
            writer.write_table(contents.slice(0, 5))

    rewrite(folder, write)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut_short, "cut short: [0-9]+ bytes instead of [0-9]+"),
        (flip_a_bit, "its SHA-256 is not that of the manifest"),
        (remove, "a shard is missing"),
        (as_parquet, "a Parquet file; a pool's shards are Arrow IPC files"),
        (as_text, "not an Arrow IPC file"),
        (broken_footer, "[Ff]ile|[Ff]ooter"),
        (other_columns, "its columns are x: int64"),
        (other_length, r"clip: fixed_size_list<item: float>\[64\]"),
        (fewer_rows, "it does not hold 562 rows"),
    ],
)
def test_a_damaged_shard_is_an_error_that_names_it_and_what_next(
    copy: Path, damage: Callable[[Path], None], why: str
) -> None:
    damage(copy)
    with pytest.raises(DataError, match=why) as caught:
        open_pool(copy).clips(np.array([0]))
    assert str(caught.value).startswith(f"read the pool: {copy / SHARD}: ")
    assert "Build the pool again" in str(caught.value)


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pool.parquet"
    pa.parquet.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DataError, match=r"pool\.parquet: a Parquet file"):
        open_pool(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version 2; this program reads 1"),
        ({"rows": 3}, "do not add up to 3"),
        ({"corpora": {"A": 1}}, "corpora's rows do not add up"),
        ({"length": "128"}, "length is not"),
        ({"length": 10**12}, "length must be from 1 to 65536"),
        ({"content_hash": "x"}, "content_hash is no SHA-256"),
        ({"shards": [{"name": "x", "rows": 9, "size": 1, "sha256": ""}] * 2, "rows": 18}, "twice"),
        ({"shards": [{"name": "../x", "rows": 2249, "size": 1, "sha256": ""}]}, r"\.\."),
    ],
)
def test_a_wrong_manifest_is_refused(copy: Path, change: dict[str, object], why: str) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(DataError, match=why):
        open_pool(copy)


def test_no_manifest_and_no_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pool\.json: no such file"):
        open_pool(tmp_path)
    with pytest.raises(DataError, match=r"pool\.json: no such folder"):
        open_pool(tmp_path / "nowhere")
    (tmp_path / MANIFEST).write_text('{"version": ')
    with pytest.raises(DataError, match="Expecting value"):
        open_pool(tmp_path)


def test_rows_that_are_not_those_of_the_content_hash_are_found(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "content_hash": "0" * 64}))
    with pytest.raises(DataError, match="its content hash is not that of the rows"):
        open_pool(copy).check_content()


def table(pool: Pool, **columns: np.ndarray[Any, Any]) -> ClipTable:
    """The pool as a table to write again, with other columns in place of its own."""
    mine = {
        "clips": pool.clips(np.arange(pool.rows)),
        "corpus": pool.corpus[:],
        "label": pool.label[:],
        "split": pool.split[:],
        "clip_id": pool.clip_id[:],
    }
    return ClipTable(**(mine | columns))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_clip_that_is_not_finite_is_named_before_anything_learns_from_it(
    pool: Pool, tmp_path: Path, bad: float
) -> None:
    clips = pool.clips(np.arange(pool.rows))
    clips[700, 3] = bad
    write_pool(tmp_path, table(pool, clips=clips), shards=2, preprocessing={})
    with pytest.raises(DataError, match=f"the clip {pool.clip_id[700]} has values that are not"):
        _ = open_pool(tmp_path).corpus


def test_a_split_that_is_neither_train_nor_test_is_refused(pool: Pool, tmp_path: Path) -> None:
    split = np.where(np.arange(pool.rows) == 5, "tset", pool.split[:])
    write_pool(tmp_path, table(pool, split=split), shards=2, preprocessing={})
    with pytest.raises(DataError, match=r"00000-of-00002\.arrow: its splits are .*tset"):
        _ = open_pool(tmp_path).corpus


def test_corpora_that_are_not_those_of_the_shards_are_refused(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["corpora"]["GunPoint"] -= 1
    manifest["corpora"]["ACSF1"] += 1
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="its corpora are not those of the shards"):
        open_pool(copy).clips(np.array([0]))


def test_a_folder_in_place_of_a_shard_is_named(copy: Path) -> None:
    (copy / SHARD).unlink()
    (copy / SHARD).mkdir()
    with pytest.raises(DataError, match="a shard is missing: this is no file"):
        open_pool(copy)


def test_a_pool_takes_forty_bytes_a_row_beside_the_page_cache(tmp_path: Path) -> None:
    count = 20_000
    numbers = np.arange(count)
    table = ClipTable(
        clips=np.zeros((count, 8), dtype=np.float32),
        corpus=np.char.add("corpus-with-a-name-", (numbers % 12).astype(str)),
        label=np.char.add("label-", (numbers % 100).astype(str)),
        split=np.where(numbers % 4 == 0, "test", "train"),
        clip_id=np.char.add("corpus-with-a-name-train-", numbers.astype(str)),
    )
    write_pool(tmp_path, table, shards=3, preprocessing={})
    del table
    pool = open_pool(tmp_path)
    pool.clips(np.array([0]))
    tracemalloc.start()
    try:
        held = (pool.corpus, pool.label, pool.split, pool.keys, pool.classes, pool.class_ids)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(held[0]) == count
    assert taken < 40 * count
