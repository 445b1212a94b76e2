"""Tests of trainer/randomness.py."""

from __future__ import annotations

import numpy as np

from trainer.pool.sample import chi_squared_bound
from trainer.randomness import mix, order, sample_keys, stream, uniform, words

KEYS = sample_keys([f"clip-{number}" for number in range(4000)])


def test_the_words_are_those_of_the_published_generator() -> None:
    # The first outputs of SplitMix64 seeded with 0, as in the reference implementation's tests.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        counters = np.arange(1, 4, dtype=np.uint64) * gamma
    assert mix(counters).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_a_sample_draws_the_same_whoever_else_is_there() -> None:
    key = stream(7, "mask", 3)
    together = words(key, KEYS, 5)
    assert (words(key, KEYS[100:103], 5) == together[100:103]).all()
    assert (words(key, KEYS, 3) == together[:, :3]).all()


def test_seed_purpose_epoch_and_sample_each_change_what_is_drawn() -> None:
    base = words(stream(1, "mask", 0), KEYS[:1], 1)[0, 0]
    others = [
        words(stream(2, "mask", 0), KEYS[:1], 1)[0, 0],
        words(stream(1, "order", 0), KEYS[:1], 1)[0, 0],
        words(stream(1, "mask", 1), KEYS[:1], 1)[0, 0],
        words(stream(1, "mask", 0), KEYS[1:2], 1)[0, 0],
    ]
    assert len({int(word) for word in [base, *others]}) == 5


def test_draws_are_uniform_by_sample_and_by_place() -> None:
    drawn = uniform(stream(3, "test"), KEYS, 16)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    for values in (drawn.ravel(), drawn[:, 0], drawn[:, 15], drawn[0], drawn.mean(axis=0)):
        assert abs(values.mean() - 0.5) < 4 / np.sqrt(12 * len(values))
    cells = np.histogram(drawn, bins=64, range=(0, 1))[0]
    expected = drawn.size / 64
    assert ((cells - expected) ** 2 / expected).sum() < chi_squared_bound(63)


def test_neighbouring_draws_are_independent() -> None:
    drawn = uniform(stream(3, "test"), KEYS, 2)
    by_epoch = uniform(stream(3, "test", 1), KEYS, 1)[:, 0]
    for other in (drawn[:, 1], by_epoch, np.roll(drawn[:, 0], 1)):
        assert abs(np.corrcoef(drawn[:, 0], other)[0, 1]) < 4 / np.sqrt(len(KEYS))


def test_an_order_is_a_permutation_and_that_of_a_subset_is_a_part_of_it() -> None:
    key = stream(5, "order", 2)
    whole = order(key, KEYS)
    assert sorted(whole.tolist()) == list(range(len(KEYS)))
    part = order(key, KEYS[:500])
    assert part.tolist() == [place for place in whole.tolist() if place < 500]
