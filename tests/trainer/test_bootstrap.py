import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from protocol.errors import DataError, UsageError
from trainer.bootstrap import bootstrap_mean


@settings(deadline=None)
@given(st.integers(50, 3000), st.floats(0.05, 0.95), st.integers(0, 2**32))
def test_hits_and_misses_have_the_quantiles_of_the_binomial(n, share, seed):
    # The bootstrap of 0/1 values is binomial exactly; only the resampling is random.
    hits = round(n * share)
    interval = bootstrap_mean([1.0] * hits + [0.0] * (n - hits), seed=seed)
    slack = 5 * np.sqrt(0.025 * 0.975 / interval.resamples)
    for end, tail in ((interval.low, 0.025), (interval.high, 0.975)):
        at = round(end * n)
        assert binom.cdf(at - 1, n, hits / n) - slack <= tail <= binom.cdf(at, n, hits / n) + slack


@settings(deadline=None, max_examples=50)
@given(st.tuples(*[st.integers(50, 400)] * 3), st.integers(0, 99))
def test_many_paired_differences_have_the_interval_of_the_normal_law(counts, seed):
    differences = np.repeat([-1.0, 0.0, 1.0], counts)
    interval = bootstrap_mean(differences, seed=seed)
    error = np.std(differences) / np.sqrt(len(differences))
    assert interval.mean == pytest.approx(np.mean(differences))
    assert interval.low == pytest.approx(interval.mean - 1.96 * error, abs=0.15 * error + 0.002)
    assert interval.high == pytest.approx(interval.mean + 1.96 * error, abs=0.15 * error + 0.002)


def test_the_interval_holds_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(7)
    held = 0
    for seed in range(400):
        sample = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.7, 0.2], size=300)
        interval = bootstrap_mean(sample, seed=seed, resamples=2000)
        held += interval.low <= 0.1 <= interval.high
    # Five standard deviations of a binomial with 400 draws at 0.95.
    assert abs(held / 400 - 0.95) < 5 * np.sqrt(0.95 * 0.05 / 400)


def test_pairing_narrows_the_interval_of_two_models_that_agree():
    rng = np.random.default_rng(1)
    champion = (rng.random(1000) < 0.7).astype(float)
    candidate = champion.copy()
    candidate[np.flatnonzero(champion == 0)[:20]] = 1.0
    paired = bootstrap_mean(candidate - champion, seed=0)
    alone = bootstrap_mean(candidate, seed=0)
    assert paired.low > 0
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_two_equal_models_differ_by_nothing():
    interval = bootstrap_mean(np.zeros(50), seed=3)
    assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_one_seed_gives_one_interval_and_another_seed_another():
    values = np.random.default_rng(0).normal(size=30)
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)


def test_no_values_or_too_few_resamples_are_refused():
    with pytest.raises(DataError):
        bootstrap_mean([], seed=0)
    with pytest.raises(DataError):
        bootstrap_mean([1.0, float("nan")], seed=0)
    with pytest.raises(UsageError):
        bootstrap_mean([1.0], seed=0, resamples=10)
    with pytest.raises(UsageError):
        bootstrap_mean([1.0], seed=0, confidence=1.0)
