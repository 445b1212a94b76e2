"""Tests of trainer/pool/sample.py: above all, that no corpus is favoured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import DataError, UsageError
from trainer.pool.build import build_pool
from trainer.pool.format import Pool, open_pool
from trainer.pool.sample import (
    Method,
    bias_test,
    chi_squared_bound,
    corpus_counts,
    read_index,
    sample,
    write_index,
)

SEEDS = range(400)
SIZE = 500


def test_over_many_seeds_no_corpus_is_favoured(pool: Pool) -> None:
    samples = [sample(pool, SIZE, seed) for seed in SEEDS]
    freedom = len(pool.manifest.corpora) - 1
    # Each statistic is chi-squared with `freedom` degrees; independent ones add up.
    total = sum(index.bias.statistic for index in samples)
    assert total < chi_squared_bound(freedom * len(SEEDS))
    # Nor too good to be random, and at the 99.9% bound one in a thousand may fail.
    assert total > 2 * freedom * len(SEEDS) - chi_squared_bound(freedom * len(SEEDS))
    assert sum(not index.bias.passed for index in samples) <= 4

    for name, held in pool.manifest.corpora.items():
        drawn = np.array([index.corpora[name] for index in samples])
        expected = SIZE * held / pool.rows
        # The hypergeometric distribution's deviation, for the mean over the seeds.
        share = held / pool.rows
        spread = np.sqrt(SIZE * share * (1 - share) * (pool.rows - SIZE) / (pool.rows - 1))
        assert abs(drawn.mean() - expected) < 4 * spread / np.sqrt(len(SEEDS)), name


def test_over_many_seeds_every_clip_is_as_likely(pool: Pool) -> None:
    counts = np.zeros(pool.rows)
    for seed in SEEDS:
        counts[sample(pool, SIZE, seed).rows] += 1
    share = SIZE / pool.rows
    statistic = ((counts - len(SEEDS) * share) ** 2).sum() / (len(SEEDS) * share * (1 - share))
    assert statistic < chi_squared_bound(pool.rows - 1)


def test_a_head_slice_would_have_failed(pool: Pool) -> None:
    head = bias_test(pool, np.arange(SIZE))
    assert not head.passed
    assert head.statistic > 50 * head.bound
    assert corpus_counts(pool, np.arange(SIZE))["OSULeaf"] == 0


@pytest.mark.parametrize("stratify", [False, True])
def test_no_clip_is_drawn_twice_and_the_size_is_kept(pool: Pool, stratify: bool) -> None:
    for size in (1, 7, 500, pool.rows):
        index = sample(pool, size, 3, stratify=stratify)
        assert len(np.unique(index.rows)) == index.size == size == sum(index.corpora.values())


def test_with_one_seed_the_small_sample_lies_in_the_large_one(pool: Pool) -> None:
    small, large = (set(sample(pool, size, 9).rows.tolist()) for size in (300, 900))
    assert small < large
    assert small != set(sample(pool, 300, 10).rows.tolist())


def test_a_sample_does_not_depend_on_the_shards(tmp_path: Path) -> None:
    ids = []
    for shards in (1, 3):
        build_pool(tmp_path / str(shards), corpora=["GunPoint", "ACSF1"], shards=shards)
        pool = open_pool(tmp_path / str(shards))
        ids.append(pool.clip_id[sample(pool, 50, 4).rows].tolist())
    assert ids[0] == ids[1]


def test_a_stratified_sample_has_every_corpus_in_proportion(pool: Pool) -> None:
    index = sample(pool, SIZE, 2, stratify=True)
    assert index.method is Method.STRATIFIED
    for name, held in pool.manifest.corpora.items():
        assert abs(index.corpora[name] - SIZE * held / pool.rows) < 1


def test_the_bound_is_near_the_exact_quantile() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (3, 5, 10, 63, 2248):
        exact = stats.chi2.ppf(0.999, freedom)
        assert abs(chi_squared_bound(freedom) - exact) < 0.3


def test_a_sample_as_large_as_the_pool_is_the_pool(pool: Pool) -> None:
    index = sample(pool, pool.rows, 0)
    assert index.rows.tolist() == list(range(pool.rows))
    assert index.bias.statistic == 0.0
    assert index.bias.passed


@pytest.mark.parametrize("size", [0, -1, 2250])
def test_a_size_out_of_range_is_refused(pool: Pool, size: int) -> None:
    with pytest.raises(UsageError, match=f"size is {size}; the pool holds 2249 clips"):
        sample(pool, size, 0)


def test_an_index_comes_back_as_it_was(pool: Pool, tmp_path: Path) -> None:
    index = sample(pool, SIZE, 1)
    write_index(tmp_path / "sub" / "index.json", index)
    read = read_index(tmp_path / "sub" / "index.json", pool)
    assert read.rows.tolist() == index.rows.tolist()
    assert (read.pool, read.seed, read.bias) == (index.pool, 1, index.bias)


def test_the_index_of_another_pool_is_refused(pool: Pool, tmp_path: Path) -> None:
    build_pool(tmp_path / "other", corpora=["GunPoint"])
    write_index(tmp_path / "index.json", sample(open_pool(tmp_path / "other"), 10, 0))
    with pytest.raises(DataError, match=f"not of {pool.content_hash[:12]}.*Draw it again"):
        read_index(tmp_path / "index.json", pool)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": [1, 1]}, "does not hold 10 different rows"),
        ({"rows": [0] * 9 + [99999], "size": 2}, "does not hold 2 different rows"),
        ({"rows": [0, 99999], "size": 2}, "rows that the pool lacks"),
        ({"rows": ["a"]}, r"IndexRecord\.rows is not"),
        ({"version": 7}, "version 7"),
        ({"method": "head"}, "'head' is not a valid Method"),
    ],
)
def test_a_malformed_index_is_refused(
    pool: Pool, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    path = tmp_path / "index.json"
    write_index(path, sample(pool, 10, 0))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=why):
        read_index(path, pool)


def test_a_missing_index_is_named(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        read_index(tmp_path / "none.json", pool)


def test_a_file_that_is_no_index_is_never_overwritten(pool_path: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pool_path, tmp_path / "pool"))
    before = (folder / "pool.json").read_bytes()
    opened = open_pool(folder)
    for path in (folder / "pool.json", folder):
        with pytest.raises(UsageError, match="something else, which is left alone"):
            write_index(path, sample(opened, 5, 1))
    assert (folder / "pool.json").read_bytes() == before
    write_index(tmp_path / "index.json", sample(opened, 5, 1))
    write_index(tmp_path / "index.json", sample(opened, 6, 1))
    assert read_index(tmp_path / "index.json", opened).size == 6


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_an_index_cannot_hold_is_refused(pool: Pool, seed: int) -> None:
    with pytest.raises(UsageError, match=f"seed is {seed}"):
        sample(pool, 5, seed)
