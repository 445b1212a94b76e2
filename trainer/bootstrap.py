"""The paired bootstrap: how sure is a difference between two models judged on the same clips?

Efron & Tibshirani 1993, chapter 13 (percentile interval); paired over test items as in Koehn
2004, "Statistical significance tests for machine translation evaluation".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError, UsageError

MIN_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, the percentile interval around it, and how it was made."""

    mean: float
    low: float
    high: float
    confidence: float
    resamples: int
    count: int


def bootstrap_mean(
    values: npt.ArrayLike, *, seed: int, resamples: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Return the mean of `values` (n,) with its bootstrap percentile interval.

    For a paired comparison `values` are the differences item by item, so that what both models
    find hard cancels out. Items are drawn with replacement, n at a time, `resamples` times.

    Only how often each distinct value is drawn matters to the mean, and those counts follow a
    multinomial distribution: drawing it is the same bootstrap in O(resamples x distinct values).

    Raises DataError when there are no values or one is not finite, UsageError when `resamples` is
    under 1,000 or `confidence` not within 0 to 1, both excluded.
    """
    items = np.asarray(values, dtype=np.float64).reshape(-1)
    if items.size == 0 or not np.isfinite(items).all():
        raise DataError("bootstrap", why="needs at least one value, and only finite ones")
    if resamples < MIN_RESAMPLES or not 0.0 < confidence < 1.0:
        raise UsageError(
            "bootstrap",
            why=f"resamples {resamples}, confidence {confidence}: right are "
            f"{MIN_RESAMPLES} or more, and a number between 0 and 1",
        )
    levels, counts = np.unique(items, return_counts=True)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(items.size, counts / items.size, size=resamples)
    means = drawn @ levels / items.size
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(
        mean=float(items.mean()),
        low=float(low),
        high=float(high),
        confidence=confidence,
        resamples=resamples,
        count=int(items.size),
    )
