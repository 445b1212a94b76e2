"""Whole shares of a whole number, in proportion."""

from __future__ import annotations

from collections.abc import Mapping


def largest_remainder(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """Share `size` out in proportion to `counts` (Hamilton's method); ties by name."""
    total = sum(counts.values())
    quotas = {name: size * count // total for name, count in counts.items()}
    remainders = sorted(counts, key=lambda name: (-(size * counts[name] % total), name))
    for name in remainders[: size - sum(quotas.values())]:
        quotas[name] += 1
    return quotas
