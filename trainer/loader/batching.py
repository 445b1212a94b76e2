"""How rows become batches: padded, packed, or a fixed number of rows of one shape.

Each knows which rows make which batch (`plan`), and what the tensors of one look like (`layout`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from protocol.errors import DataError, UsageError
from trainer.loader.kernels import Counts
from trainer.loader.plan import Lengths, Plan, Rows, in_buckets, in_fixed_numbers, in_packs, padded
from trainer.loader.rows import Rows as Source
from trainer.randomness import stream

WINDOW = 16_384


class TooLong(StrEnum):
    """What becomes of a row that is longer than the budget lets it be."""

    ERROR = "error"
    SKIP = "skip"
    TRUNCATE = "truncate"  # its first values are used


@dataclass(frozen=True, eq=False)
class Layout:
    """One batch: the shape of a column whose rows differ in length, and how many values of each row
    are used, (n,)."""

    shape: tuple[int, ...]
    counts: Counts


class Batching(Protocol):
    """A way to make batches."""

    @property
    def ragged(self) -> bool:
        """Whether it is for columns whose rows differ in length, or for none of them."""
        ...

    @property
    def packed(self) -> bool:
        """Whether rows stand one after another, rather than each on a line."""
        ...

    def plan(self, source: Source, rows: Rows, seed: int, epoch: int) -> tuple[Plan, Counter[str]]:
        """Return which of `rows`, in which order, make which batch; and how many rows were left out
        or cut, by why. Raises DataError when a row is refused."""
        ...

    def layout(self, lengths: Lengths) -> Layout:
        """Return what a batch of rows of these lengths looks like."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what the plan depends on, as JSON."""
        ...


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Batches of rows of like length, padded to the longest, with at most `budget` slots.

    Each `window` rows of the epoch's order are sorted by length; then all batches are shuffled. A
    larger window pads less, a smaller one mixes more. Widths are multiples of `multiple`. A row is
    used up to `longest` values, the budget by default.
    """

    budget: int = 65_536
    window: int = WINDOW
    multiple: int = 1
    longest: int = 0
    too_long: TooLong = TooLong.ERROR
    ragged: bool = field(default=True, init=False)
    packed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check("budget", self.budget, 1, 2**31 - 1)
        _check("window", self.window, 1, 2**31 - 1)
        _check("multiple", self.multiple, 1, self.budget)
        _check("longest", self.longest, 0, self.budget)

    @property
    def limit(self) -> int:
        return self.longest or self.budget

    def plan(self, source: Source, rows: Rows, seed: int, epoch: int) -> tuple[Plan, Counter[str]]:
        rows, lengths, left = _fitting(source, rows, self.limit, self.too_long)
        plan = in_buckets(
            rows,
            lengths,
            budget=self.budget,
            window=self.window,
            multiple=self.multiple,
            key=stream(seed, "batches", epoch),
        )
        return plan, left

    def layout(self, lengths: Lengths) -> Layout:
        counts = np.minimum(lengths, self.limit).astype(np.int64)
        width = int(padded(counts.max(keepdims=True), self.multiple, self.budget)[0])
        return Layout((len(counts), width), counts)

    def state(self) -> Mapping[str, Any]:
        return {
            "batching": "padded",
            "budget": self.budget,
            "window": self.window,
            "multiple": self.multiple,
            "longest": self.limit,
            "too_long": str(self.too_long),
        }


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Batches of whole rows, one after another, at most `budget` values together (best fit).

    With `full`, each batch is as long as the budget, zeros at its end: one shape for a compiler.
    """

    budget: int = 65_536
    longest: int = 0
    too_long: TooLong = TooLong.ERROR
    full: bool = False
    ragged: bool = field(default=True, init=False)
    packed: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _check("budget", self.budget, 1, 2**31 - 1)
        _check("longest", self.longest, 0, self.budget)

    @property
    def limit(self) -> int:
        return self.longest or self.budget

    def plan(self, source: Source, rows: Rows, seed: int, epoch: int) -> tuple[Plan, Counter[str]]:
        rows, lengths, left = _fitting(source, rows, self.limit, self.too_long)
        key = stream(seed, "batches", epoch)
        return in_packs(rows, lengths, budget=self.budget, key=key), left

    def layout(self, lengths: Lengths) -> Layout:
        counts = np.minimum(lengths, self.limit).astype(np.int64)
        return Layout((self.budget if self.full else int(counts.sum()),), counts)

    def state(self) -> Mapping[str, Any]:
        return {
            "batching": "packed",
            "budget": self.budget,
            "longest": self.limit,
            "too_long": str(self.too_long),
        }


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Batches of `size` rows of one shape; the last of an epoch may hold less."""

    size: int
    ragged: bool = field(default=False, init=False)
    packed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check("size", self.size, 1, 2**31 - 1)

    def plan(self, source: Source, rows: Rows, seed: int, epoch: int) -> tuple[Plan, Counter[str]]:
        return in_fixed_numbers(rows, self.size), Counter()

    def layout(self, lengths: Lengths) -> Layout:
        return Layout((len(lengths), int(lengths[0])), lengths.astype(np.int64))

    def state(self) -> Mapping[str, Any]:
        return {"batching": "fixed", "size": self.size}


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        why = f"{name} is {value}; it must be from {least} to {most}"
        raise UsageError("make batches", why=why)


def _fitting(
    source: Source, rows: Rows, limit: int, policy: TooLong
) -> tuple[Rows, Lengths, Counter[str]]:
    """Return the rows that can be used, how many values of each, and what was left out or cut."""
    lengths = source.lengths[rows]
    over, empty = lengths > limit, lengths == 0
    left = Counter({"empty": int(empty.sum())})
    if over.any() and policy is TooLong.ERROR:
        row = int(rows[over.argmax()])
        raise DataError(
            "make batches",
            why=f"{source.where(row)} has {source.lengths[row]} values, and {limit} are the most",
            hint="Choose what becomes of such rows: too_long is 'skip' or 'truncate'.",
        )
    left["skipped" if policy is TooLong.SKIP else "truncated"] = int(over.sum())
    usable = ~empty & ~over if policy is TooLong.SKIP else ~empty
    if not usable.all():
        rows, lengths = rows[usable], lengths[usable]
    return rows, np.minimum(lengths, limit), +left
