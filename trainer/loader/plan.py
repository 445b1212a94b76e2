"""Which rows make which batch of an epoch: computed beforehand, from lengths and a key alone.

A plan is data, two arrays. So to resume is to go to a place in it, whatever was read ahead by
however many threads; and ranks that compute it from the same inputs need not tell each other
anything.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from protocol.errors import UsageError
from trainer.randomness import order

Rows = NDArray[np.int64]
Lengths = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Plan:
    """Batch `i` is `rows[bounds[i]:bounds[i + 1]]`."""

    rows: Rows
    bounds: Rows

    def __len__(self) -> int:
        return len(self.bounds) - 1


def in_fixed_numbers(rows: Rows, count: int) -> Plan:
    """Cut rows into batches of `count`; the last may hold less."""
    return Plan(rows, np.append(np.arange(0, len(rows), count), len(rows)))


def in_buckets(
    rows: Rows, lengths: Lengths, *, budget: int, window: int, multiple: int, key: np.uint64
) -> Plan:
    """Batch rows of like length, so that a padded batch has at most `budget` slots.

    `lengths` (n,) are those of `rows`, none above `budget`. Each `window` rows that follow one
    another are sorted by length and cut into batches, each as large as the budget lets it be; then
    the batches are shuffled by `key`. A batch is as wide as its longest row, rounded up to a
    `multiple`.
    """
    by_length = np.lexsort((lengths, np.arange(len(rows)) // window))
    widths = padded(lengths[by_length].astype(np.int64), multiple, budget)
    bounds = [0]
    for start in range(0, len(rows), window):
        stop = min(start + window, len(rows))
        while bounds[-1] < stop:
            bounds.append(_end_of(widths, bounds[-1], stop, budget))
    return _shuffled(Plan(rows[by_length], np.array(bounds, dtype=np.int64)), key)


def padded(lengths: Rows, multiple: int, budget: int) -> Rows:
    """Return the widths of padded batches whose longest rows have these lengths."""
    return np.minimum(-(-lengths // multiple) * multiple, budget)


def _end_of(widths: Rows, start: int, stop: int, budget: int) -> int:
    """Return where the batch from `start` on ends: widths ascend, and so do the slots it takes."""

    def slots(end: int) -> int:
        return (end - start) * int(widths[end - 1])

    return bisect_right(range(stop + 1), budget, lo=start + 1, hi=stop + 1, key=slots) - 1


def in_packs(rows: Rows, lengths: Lengths, *, budget: int, key: np.uint64) -> Plan:
    """Pack rows one after another into batches of at most `budget` values, by best fit: each row
    goes where it leaves the least room, or into a new batch. Then the batches are shuffled by
    `key`.

    `lengths` (n,) are those of `rows`, none above `budget`.
    """
    pack = best_fit(lengths, budget)
    by_pack = np.argsort(pack, kind="stable")
    starts = np.flatnonzero(np.diff(pack[by_pack], prepend=-1))
    return _shuffled(Plan(rows[by_pack], np.append(starts, len(rows)).astype(np.int64)), key)


def best_fit(lengths: Lengths, budget: int) -> Rows:
    """Return for each row the number of its pack, (n,)."""
    packs = np.empty(len(lengths), dtype=np.int64)
    room: list[int] = []  # what is left in each pack that is not full, ascending
    owner: list[int] = []  # and which pack that is
    count = 0
    least = int(lengths.min()) if len(lengths) else 0
    for row, length in enumerate(lengths.tolist()):
        at = bisect_left(room, length)
        if at < len(room):
            left, pack = room.pop(at) - length, owner.pop(at)
        else:
            left, pack, count = budget - length, count, count + 1
        packs[row] = pack
        if left >= least:
            at = bisect_left(room, left)
            room.insert(at, left)
            owner.insert(at, pack)
    return packs


def _shuffled(plan: Plan, key: np.uint64) -> Plan:
    """Return the plan with its batches in random order."""
    if not len(plan):
        return plan
    first = plan.rows[plan.bounds[:-1]].astype(np.uint64)
    turn = order(key, first)
    sizes = np.diff(plan.bounds)[turn]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    # Where each row of the new order stood in the old one.
    places = np.repeat(plan.bounds[:-1][turn] - bounds[:-1], sizes) + np.arange(len(plan.rows))
    return Plan(plan.rows[places], bounds)


def deal(bounds: Rows, world_size: int, *, offset: int = 0, drop_last: bool = False) -> Rows:
    """Return the bounds of what each rank gets, from row `offset` of a plan on: (steps * W + 1,).

    Part `k * W + rank` is that rank's at step k, so ranks have as many steps. Where the batches do
    not go round, the last ones are split, a row at the least each: nothing is left out, unless
    `drop_last`, and nothing is seen twice.

    Raises UsageError when there are fewer rows than batches that would go round.
    """
    bounds = np.concatenate([[offset], bounds[bounds > offset]])
    count = len(bounds) - 1
    over = count % world_size
    if not over:
        return bounds
    if drop_last:
        return bounds[: count - over + 1]
    split, wanted = over, world_size
    while bounds[-1] - bounds[count - split] < wanted and split + world_size <= count:
        split, wanted = split + world_size, wanted + world_size
    if bounds[-1] - bounds[count - split] < wanted:
        why = f"{bounds[-1] - offset} rows do not go round {world_size} ranks in {wanted} batches"
        hint = "Use fewer ranks, or drop_last."
        raise UsageError("share out the rows", why=why, hint=hint)
    tail = _split([int(b) for b in bounds[count - split :]], wanted)
    return np.concatenate([bounds[: count - split], tail])


def _split(bounds: list[int], wanted: int) -> list[int]:
    """Halve the largest of these batches, again and again, until there are as many as wanted."""
    parts = [(start - stop, start) for start, stop in pairwise(bounds)]
    heapq.heapify(parts)
    while len(parts) < wanted:
        size, start = heapq.heappop(parts)
        first = size // 2  # both are negative: the first half is the larger one
        heapq.heappush(parts, (first, start))
        heapq.heappush(parts, (size - first, start - first))
    return [*sorted(start for _, start in parts), bounds[-1]]
