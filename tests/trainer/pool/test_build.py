"""Tests of trainer/pool/build.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from protocol.errors import BusyError, UsageError
from trainer.pool.build import CORPORA, ClipTable, build_pool, preprocess, write_pool
from trainer.pool.format import Pool, open_pool


def table(pool: Pool, rows: slice) -> ClipTable:
    """Return rows of a pool as a table to write."""
    numbers = np.arange(pool.rows)[rows]
    return ClipTable(
        clips=pool.clips(numbers),
        corpus=pool.corpus[numbers],
        label=pool.label[numbers],
        split=pool.split[numbers],
        clip_id=pool.clip_id[numbers],
    )


def test_the_pool_holds_the_corpora_as_their_authors_split_them(pool: Pool) -> None:
    assert sorted(pool.manifest.corpora) == sorted(CORPORA)
    # Sizes as the archive's paper gives them (Dau et al. 2019, table of data sets).
    sizes = {"ArrowHead": (36, 175), "GunPoint": (50, 150), "ItalyPowerDemand": (67, 1029)}
    for name, (train, test) in sizes.items():
        mine = pool.corpus.is_(name)
        assert (mine & (pool.split.is_("train"))).sum() == train
        assert (mine & (pool.split.is_("test"))).sum() == test
    assert set(pool.split.names) == {"train", "test"}
    assert len(set(pool.clip_id[:])) == pool.rows == 2249
    pool.check_content()


def test_clips_are_the_series_themselves_resampled_and_normalised(pool: Pool) -> None:
    from aeon.datasets import load_gunpoint

    series, labels = load_gunpoint(split="train")
    rows = np.flatnonzero(np.char.startswith(pool.clip_id[:], "GunPoint-train-"))
    assert pool.label[rows].tolist() == labels.tolist()
    clips = pool.clips(rows)
    assert np.allclose(clips.mean(axis=1), 0, atol=1e-5)
    assert np.allclose(clips.std(axis=1), 1, atol=1e-4)
    for clip, (original,) in zip(clips, series, strict=True):
        at = np.interp(np.linspace(0, 149, 128), np.arange(150), original)
        assert np.corrcoef(clip, at)[0, 1] > 0.999999


def test_preprocessing_keeps_ends_and_turns_a_constant_into_zeros() -> None:
    ramp = preprocess(np.arange(7, dtype=np.float64), 13)
    assert ramp.dtype == np.float32
    assert np.allclose(np.diff(ramp), ramp[1] - ramp[0], atol=1e-6)
    assert (preprocess(np.full(5, 3.0), 4) == 0).all()


def test_a_naive_writers_order_puts_corpus_after_corpus(pool: Pool) -> None:
    changes = np.count_nonzero(np.diff(pool.corpus.codes.astype(int)))
    assert changes == len(CORPORA) - 1


def test_the_content_hash_does_not_depend_on_the_shards(pool: Pool, tmp_path: Path) -> None:
    part = table(pool, slice(100, 400))
    one = write_pool(tmp_path / "one", part, shards=1, preprocessing={})
    seven = write_pool(tmp_path / "seven", part, shards=7, preprocessing={})
    assert one.content_hash == seven.content_hash
    assert len(seven.shards) == 7
    other = write_pool(tmp_path / "o", table(pool, slice(101, 401)), shards=1, preprocessing={})
    assert other.content_hash != one.content_hash


def test_building_again_gives_the_same_bytes_and_leaves_no_old_shard(tmp_path: Path) -> None:
    first = build_pool(tmp_path, corpora=["GunPoint"], shards=3)
    second = build_pool(tmp_path, corpora=["GunPoint"], shards=2)
    assert second.content_hash == first.content_hash
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [
        "pool-00000-of-00002.arrow",
        "pool-00001-of-00002.arrow",
        "pool.json",
    ]
    third = build_pool(tmp_path, corpora=["GunPoint"], shards=2)
    assert third == second
    open_pool(tmp_path).check_content()


def test_wrong_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"aeon carries no GunPiont_TRAIN.ts.*Known corpora: A"):
        build_pool(tmp_path, corpora=["GunPiont"])
    with pytest.raises(UsageError, match="length is 1"):
        build_pool(tmp_path, length=1)
    with pytest.raises(UsageError, match="shards is 0"):
        build_pool(tmp_path, corpora=["GunPoint"], shards=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "aeon", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'syncd\[demo\]'"):
        build_pool(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_clips_with_one_id_are_refused(pool: Pool, tmp_path: Path) -> None:
    part = table(pool, slice(0, 10))
    doubled = ClipTable(**{**vars(part), "clip_id": np.full(10, "same")})
    with pytest.raises(UsageError, match="two clips have one id"):
        write_pool(tmp_path, doubled, shards=1, preprocessing={})


def test_two_processes_do_not_write_one_pool_at_once(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(BusyError, match="another process holds it"):
        build_pool(tmp_path, corpora=["GunPoint"])
    (tmp_path / ".pool.json.0123456789ab.tmp").write_text("half")
    build_pool(tmp_path, corpora=["GunPoint"])
    assert not list(tmp_path.glob("*.tmp"))
