from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.loader.sampler import ByGroup, InOrder, Sampler, Shuffled
from trainer.randomness import sample_keys

CORPORA = np.array(["a"] * 60 + ["b"] * 30 + ["c"] * 10)


def test_rows_in_order_stand_as_they_are():
    assert list(InOrder(count=4).rows(7)) == [0, 1, 2, 3]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    sampler = Shuffled(100, seed=1)
    first, second = sampler.rows(0), sampler.rows(1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert list(first) != list(second)
    assert list(first) == list(Shuffled(100, seed=1).rows(0))
    assert list(first) != list(Shuffled(100, seed=2).rows(0))


def test_a_smaller_sample_lies_within_a_larger_one_and_is_the_same_each_epoch():
    small, large = Shuffled(500, seed=4, size=50), Shuffled(500, seed=4, size=200)
    assert set(small.rows(0)) == set(small.rows(3))
    assert len(small.rows(0)) == 50
    assert set(small.rows(0)) < set(large.rows(0))


def test_a_sample_takes_each_row_as_often_as_any_other():
    taken = Counter(row for seed in range(400) for row in Shuffled(50, seed=seed, size=10).rows(0))
    counts = np.array([taken[row] for row in range(50)])
    # Binomial, 400 draws of 1/5: mean 80, standard deviation 8.
    assert (abs(counts - 80) < 5 * 8).all()
    assert ((counts - 80) ** 2 / 64).sum() < 50 + 5 * np.sqrt(2 * 50)


def test_keys_of_ids_make_the_order_that_of_the_ids_wherever_they_stand():
    ids = np.array([f"clip-{number}" for number in range(40)])
    turned = ids[::-1]
    there = ids[Shuffled(40, seed=3, keys=sample_keys(ids)).rows(2)]
    here = turned[Shuffled(40, seed=3, keys=sample_keys(turned)).rows(2)]
    assert list(there) == list(here)


def test_a_subset_is_all_that_an_epoch_has():
    assert set(Shuffled(100, seed=1, subset=np.array([5, 9, 7])).rows(0)) == {5, 7, 9}


def test_strata_are_shared_out_in_proportion():
    sampler = ByGroup(CORPORA, size=50, seed=1)
    assert Counter(CORPORA[sampler.rows(0)]) == {"a": 30, "b": 15, "c": 5}
    assert len(set(sampler.rows(0))) == 50
    assert set(sampler.rows(0)) != set(sampler.rows(1))


def test_weights_say_how_much_of_an_epoch_each_corpus_has():
    sampler = ByGroup(CORPORA, size=100, seed=1, weights={"a": 1, "c": 0.25})
    rows = sampler.rows(0)
    assert Counter(CORPORA[rows]) == {"a": 80, "c": 20}


def test_a_small_corpus_is_repeated_evenly_and_not_in_one_place():
    sampler = ByGroup(CORPORA, size=1000, seed=1, weights={"a": 3, "c": 1})
    rows = sampler.rows(0)
    of_c = Counter(rows[CORPORA[rows] == "c"])
    assert sum(of_c.values()) == 250
    assert set(of_c.values()) == {25}
    neighbours = np.sum(rows[1:] == rows[:-1])
    assert neighbours < 60  # about 1000 * (.75**2 / 60 + .25**2 / 10) = 16


@given(st.integers(1, 300), st.integers(0, 5))
def test_shares_add_up_and_no_row_is_seen_twice_more_than_another(size, seed):
    rows = ByGroup(CORPORA, size=size, seed=seed, weights={"a": 0.2, "b": 1, "c": 7.3}).rows(seed)
    assert len(rows) == size
    for name in "abc":
        counts = Counter(rows[CORPORA[rows] == name])
        seen = [counts[row] for row in np.flatnonzero(name == CORPORA)]
        assert max(seen) - min(seen) <= 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Shuffled(5, seed=0, size=6), "from 1 to 5"),
        (lambda: Shuffled(5, seed=0, size=0), "from 1 to 5"),
        (lambda: Shuffled(5, seed=0, subset=np.array([5])), "between 0 and 4"),
        (lambda: Shuffled(5, seed=0, keys=np.zeros(4, dtype=np.uint64)), "4 keys for 5 rows"),
        (lambda: ByGroup(CORPORA, size=101, seed=0), "from 1 to 100"),
        (lambda: ByGroup(CORPORA, size=9, seed=0, weights={"d": 1}), "the groups are a, b, c"),
        (lambda: ByGroup(CORPORA, size=9, seed=0, weights={"a": -1}), "0 or more"),
        (lambda: ByGroup(CORPORA, size=9, seed=0, weights={"a": float("nan")}), "0 or more"),
        (lambda: ByGroup(CORPORA, size=9, seed=0, weights={"a": 0}), "no group has a weight"),
    ],
)
def test_what_cannot_be_sampled_is_refused(make, why):
    with pytest.raises(UsageError, match=why):
        make()


def test_the_state_tells_samplers_apart():
    samplers: list[Sampler] = [
        InOrder(count=100),
        InOrder(count=99),
        Shuffled(100, seed=0),
        Shuffled(100, seed=1),
        Shuffled(100, seed=0, size=50),
        Shuffled(100, seed=0, subset=np.arange(50)),
        Shuffled(100, seed=0, keys=sample_keys(map(str, range(100)))),
        ByGroup(CORPORA, size=50, seed=0),
        ByGroup(CORPORA, size=50, seed=0, weights={"a": 1}),
        ByGroup(CORPORA[::-1], size=50, seed=0),
    ]
    states = [str(sampler.state()) for sampler in samplers]
    assert len(set(states)) == len(states)
    assert str(Shuffled(100, seed=0).state()) == states[2]
