"""torch's DataLoader, as every peer that needs it uses it.

- https://docs.pytorch.org/docs/stable/data.html: a batch sampler for map-style datasets; a
  dataset that yields batches itself with `batch_size=None`; tensors, not arrays, from workers,
  because they travel by shared memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.bench.batches import Batch, Row, as_they_come
from trainer.bench.contestant import Batches


def tensors(batch: Batch) -> Batch:
    """Return a batch of NumPy arrays as one of tensors on the same memory."""
    return Batch(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask))


def closing_workers(loader: Any) -> Batches:
    """Yield a DataLoader's batches; when closed early, its worker processes are ended at once."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        # Otherwise they go when the iterator is collected, in somebody else's turn.
        end = getattr(batches, "_shutdown_workers", None)
        if end is not None:
            end()


class Budgeted(IterableDataset[Batch]):
    """Batches within the budget of the rows that an iterable dataset yields in its own order.

    It is the dataset that shares its rows among the workers, so each cuts batches of its own.
    """

    def __init__(self, rows: Iterable[Any], columns: Callable[[Any], Row]) -> None:
        self._rows = rows
        self._columns = columns

    def __iter__(self) -> Iterator[Batch]:
        yield from map(tensors, as_they_come(map(self._columns, self._rows)))


def budgeted(rows: Iterable[Any], columns: Callable[[Any], Row], *, workers: int) -> Batches:
    """Yield batches of an iterable dataset's rows through a DataLoader with so many workers."""
    loader = DataLoader(Budgeted(rows, columns), batch_size=None, num_workers=workers)
    yield from closing_workers(loader)
