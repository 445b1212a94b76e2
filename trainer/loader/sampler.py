"""Which rows an epoch has, and in which order: from (seed, epoch) and the rows alone.

The order is that of a keyed hash of each row (`trainer/randomness.py`): no library's version
changes it, and of two samples of a seed the smaller one lies within the larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import UsageError
from trainer.apportion import largest_remainder
from trainer.loader.plan import Rows
from trainer.randomness import Words, mix, order, stream

_WHAT = "sample the rows"


class Sampler(Protocol):
    """Chooses and orders the rows of an epoch."""

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch, in order, (n,)."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what the order depends on besides the epoch, as JSON: a position is one in it."""
        ...


@dataclass(frozen=True, kw_only=True)
class InOrder:
    """All of `count` rows as they stand."""

    count: int

    def rows(self, epoch: int) -> Rows:
        return np.arange(self.count, dtype=np.int64)

    def state(self) -> Mapping[str, Any]:
        return {"sampler": "in order", "count": self.count}


class Shuffled:
    """Rows in an order that each epoch draws anew: all of `count`, or those of a subset.

    With `size` only so many of them, the same in every epoch: a uniformly random sample without
    replacement. `keys` (count,) are what the rows are drawn by, in place of their numbers: keys of
    their ids make the draw independent of how they are cut into shards.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        subset: Rows | None = None,
        size: int | None = None,
        keys: Words | None = None,
    ) -> None:
        """Raises UsageError for a size that there is not, and rows that are not there."""
        self.seed = seed
        self._keys = _Keys(count, keys)
        self._rows = np.arange(count) if subset is None else _checked(subset, count)
        if size is not None:
            _check_size(size, len(self._rows))
            drawn = order(stream(seed, "sample"), self._keys.of(self._rows))[:size]
            self._rows = np.sort(self._rows[drawn])

    def rows(self, epoch: int) -> Rows:
        return self._rows[order(stream(self.seed, "order", epoch), self._keys.of(self._rows))]

    def state(self) -> Mapping[str, Any]:
        return {"sampler": "shuffled", "seed": self.seed, "rows": self._keys.digest(self._rows)}


class ByGroup:
    """`size` rows an epoch, shared out between groups, such as corpora: by `weights`, or in
    proportion to how many rows each has (stratified).

    Shares are exact, by largest remainder. A group whose share is larger than itself is seen more
    than once, each of its rows as often as any other or once more.
    """

    def __init__(
        self,
        groups: Sequence[str] | NDArray[Any],
        *,
        size: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        keys: Words | None = None,
    ) -> None:
        """`groups` (count,) is the group of each row. Raises UsageError for a size or weights that
        cannot be."""
        names, codes = np.unique(np.asarray(groups), return_inverse=True)
        self.seed = seed
        self._keys = _Keys(len(codes), keys)
        members = {str(name): np.flatnonzero(codes == code) for code, name in enumerate(names)}
        counts = {name: len(rows) for name, rows in members.items()}
        if weights is None:
            _check_size(size, len(codes))
        shares = largest_remainder(counts if weights is None else _shares(weights, counts), size)
        self._members = [(members[name], share) for name, share in shares.items() if share]
        self.shares = shares

    def rows(self, epoch: int) -> Rows:
        drawn = [_drawn(rows, share, self._keys, self.seed, epoch) for rows, share in self._members]
        rows, turns = (np.concatenate(each) for each in zip(*drawn, strict=True))
        keys = mix(self._keys.of(rows) ^ mix(turns))
        chosen: Rows = rows[order(stream(self.seed, "order", epoch), keys)]
        return chosen

    def state(self) -> Mapping[str, Any]:
        drawn = [[self._keys.digest(rows), share] for rows, share in self._members]
        return {"sampler": "by group", "seed": self.seed, "drawn": drawn}


def _drawn(rows: Rows, share: int, keys: _Keys, seed: int, epoch: int) -> tuple[Rows, Words]:
    """Return `share` of a group's rows, and how often each stood there before."""
    turns, rest = divmod(share, len(rows))
    last = rows[order(stream(seed, "group", epoch), keys.of(rows))[:rest]]
    drawn = np.concatenate([np.tile(rows, turns), last])
    before = np.repeat(np.arange(turns + 1, dtype=np.uint64), [*[len(rows)] * turns, rest])
    return drawn, before


def _shares(weights: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, int]:
    """Return weights as whole numbers, of which the largest is 10 to the 12th."""
    for name, weight in weights.items():
        if name not in counts:
            why = f"there is no group {name!r}; the groups are {', '.join(sorted(counts)[:20])}"
            raise UsageError(_WHAT, why=why)
        if not 0 <= weight < float("inf"):
            raise UsageError(_WHAT, why=f"the weight of {name!r} is {weight}; it must be 0 or more")
    most = max(weights.values(), default=0.0)
    if most <= 0:
        raise UsageError(_WHAT, why="no group has a weight above 0")
    return {name: round(weight / most * 10**12) for name, weight in weights.items()}


class _Keys:
    """What rows are drawn by: given, or their numbers."""

    def __init__(self, count: int, keys: Words | None) -> None:
        if keys is not None and len(keys) != count:
            raise UsageError(_WHAT, why=f"there are {len(keys)} keys for {count} rows")
        self._given = keys

    def of(self, rows: Rows) -> Words:
        return rows.astype(np.uint64) if self._given is None else self._given[rows]

    def digest(self, rows: Rows) -> str:
        """Return a short digest of which rows there are to draw, in any order."""
        words = mix(self.of(rows) ^ mix(rows.astype(np.uint64)))
        return f"{len(rows)}-{int(np.bitwise_xor.reduce(words, initial=np.uint64(0))):016x}"


def _checked(subset: Rows, count: int) -> Rows:
    rows = np.asarray(subset, dtype=np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        raise UsageError(_WHAT, why=f"a row of the subset is not between 0 and {count - 1}")
    return rows


def _check_size(size: int, count: int) -> None:
    if not 1 <= size <= count:
        raise UsageError(
            _WHAT, why=f"size is {size}; it must be from 1 to {count}, the rows there are"
        )
