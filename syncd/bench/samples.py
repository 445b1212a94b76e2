"""How many samples a run of the benchmark takes, and what is told of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured; times in seconds, sizes in bytes."""

    samples: int
    baseline_samples: int
    log_seconds: float
    slow_log_seconds: float
    bar_seconds: float
    large_log: int
    idle_after: float
    idle_seconds: float
    first_appends: int
    large_file: int
    bursts: int
    served_files: int


FULL = Scale(
    samples=40,
    baseline_samples=20,
    log_seconds=240.0,
    slow_log_seconds=120.0,
    bar_seconds=300.0,
    large_log=GIB,
    idle_after=10.0,
    idle_seconds=330.0,  # heartbeats are gathered into a state about every five minutes
    first_appends=5,
    large_file=GIB,
    bursts=10,
    served_files=60_000,
)
QUICK = Scale(
    samples=20,
    baseline_samples=20,
    log_seconds=30.0,
    slow_log_seconds=30.0,
    bar_seconds=120.0,
    large_log=64 * MIB,
    idle_after=5.0,
    idle_seconds=120.0,
    first_appends=2,
    large_file=128 * MIB,
    bursts=3,
    served_files=2_000,
)


def p50(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile, between the two samples next to it."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def size_text(size: int) -> str:
    """Return a size as a row's name has it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"
