"""A batch: tensors by column, and what they were made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.loader.plan import Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Mapping[str, Tensor]):
    """What a loader yields; as a mapping, its tensors by column.

    Padded: (n, width) a column, row i of it `lengths[i]` values and then zeros. Packed: (tokens,) a
    column, document i from `boundaries[i]` to `boundaries[i + 1]`, and zeros behind the last one.
    Fixed: (n, *shape). `rows` (n,) are the rows of the source, in the order that they stand here;
    `boundaries` is empty but in a packed batch, (n + 1,), as attention over variable lengths takes
    them (`cu_seqlens`). Both lengths and boundaries are int32.

    `step` counts this rank's batches of the epoch, from 0. `longest` is the largest of the lengths,
    `tokens` their sum.
    """

    tensors: Mapping[str, Tensor]
    lengths: Tensor
    boundaries: Tensor
    rows: Rows
    epoch: int
    step: int
    longest: int
    tokens: int

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return how many columns there are."""
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns' tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """Return the batch on a device. From pinned memory the copy goes on beside what the caller
        does next; what is computed on that device after it sees all of it."""
        return replace(
            self,
            tensors={
                name: tensor.to(device, non_blocking=non_blocking)
                for name, tensor in self.tensors.items()
            },
            lengths=self.lengths.to(device, non_blocking=non_blocking),
            boundaries=self.boundaries.to(device, non_blocking=non_blocking),
        )
