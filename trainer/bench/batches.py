"""What a batch is to everybody who takes part, how one is cut and padded, and when it is right.

A batch is padded: `ids` and `mask` of shape (n, longest), 0 where a row has ended, and n times
longest is within the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataError
from trainer.bench.corpus import Corpus, padded_sums

BUDGET = 65_536

Rows = NDArray[np.int64]
Plan = Sequence[Rows]
Row = tuple[NDArray[np.int32], NDArray[np.int8]]


class Batch(NamedTuple):
    """`ids` (n, longest) int32 and `mask` (n, longest) int8, both NumPy's or both torch's."""

    ids: Any
    mask: Any


def pad(rows: Sequence[Row]) -> Batch:
    """Return the rows as one padded batch of NumPy arrays: slices copied, the fastest in NumPy."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    padded = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int8))
    for place, (ids, mask) in enumerate(rows):
        padded.ids[place, : len(ids)] = ids
        padded.mask[place, : len(mask)] = mask
    return padded


def as_they_come(rows: Iterable[Row], *, budget: int = BUDGET) -> Iterator[Batch]:
    """Cut rows into batches in the order in which they come, none over the budget."""
    held: list[Row] = []
    longest = 0
    for row in rows:
        length = len(row[0])
        if held and (len(held) + 1) * max(longest, length) > budget:
            yield pad(held)
            held, longest = [], 0
        held.append(row)
        longest = max(longest, length)
    if held:
        yield pad(held)


def row_numbers(batch: Batch) -> Rows:
    """Return the number (n,) of each row of a batch: its first token."""
    return numpy(batch.ids)[:, 0].astype(np.int64)


def numpy(values: Any) -> NDArray[Any]:
    """Return an array, or the array on the memory of a tensor."""
    found: NDArray[Any] = values if isinstance(values, np.ndarray) else values.numpy()
    return found


def check(batch: Batch, corpus: Corpus, *, who: str, budget: int = BUDGET) -> Rows:
    """Return the numbers (n,) of the rows in a batch.

    Raises DataError when a value of it is not the corpus', or when it is over the budget.
    """
    ids, mask = numpy(batch.ids), numpy(batch.mask)
    what = f"check what {who} yields"
    if ids.shape != mask.shape or ids.size > budget:
        why = f"a batch has ids of shape {ids.shape} and a mask of shape {mask.shape}"
        raise DataError(what, why=f"{why}; the budget is {budget} slots")
    if ids.dtype != np.int32 or mask.dtype != np.int8:
        raise DataError(what, why=f"its types are {ids.dtype} and {mask.dtype}")
    numbers = row_numbers(batch)
    if numbers.min() < 0 or numbers.max() >= corpus.rows:
        raise DataError(what, why="a row does not begin with its number")
    wrong = padded_sums(ids, mask) != corpus.sums[numbers]
    if wrong.any():
        raise DataError(
            what,
            path=corpus.folder,
            why=f"row {numbers[wrong][0]} is not the corpus'",
            hint="Remove the folder if another version wrote it.",
        )
    return numbers
