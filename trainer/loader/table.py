"""Putting the batches of many shards together: addresses and lengths of all rows, and no values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protocol.errors import DataError
from trainer.loader.arrow import READ, Shard
from trainer.loader.columns import Column, Layout, Lengths, RowError, Spans, spans
from trainer.loader.preload import will_need

_LARGE = 1 << 16

T = TypeVar("T", np.int32, np.int64)


@dataclass(frozen=True, kw_only=True)
class Table:
    """`columns` and their `lengths` (rows,); `ends` (shards,): the row after each shard's last.

    `null_rows` are rows in which a ragged column is null, `decoded` the bytes of values that are
    in memory and not in a mapped file, `decoded_from` the first file with such.
    """

    columns: Mapping[str, Column]
    lengths: Lengths
    ends: NDArray[np.int64]
    null_rows: int
    decoded: int
    decoded_from: Path | None

    def select(self, rows: NDArray[np.int64]) -> Table:
        """Return the table of `rows`, each between 0 and the table's, in their order."""
        lengths = self.lengths[rows]
        columns = {
            name: replace(
                column,
                starts=column.starts[rows],
                lengths=lengths if column.shape is None else _repeat(column.shape, len(rows)),
            )
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, lengths=lengths)


class TableBuilder:
    """Collects the rows of shards that have `nbytes` together and columns of `layouts`."""

    def __init__(self, layouts: Mapping[str, Layout], nbytes: int) -> None:
        self._layouts = layouts
        self._nbytes = nbytes
        self._starts = {name: _Growing(np.int64) for name in layouts}
        self._lengths = _Growing(np.int32)
        self._rows = 0
        self._ends: list[int] = []
        self._owners: list[object] = []
        self._null_rows = 0
        self._decoded = 0
        self._decoded_from: Path | None = None

    def add(self, shard: Shard) -> None:
        """Add the rows of `shard`.

        Raises DataError, which names the shard, and the row and column where one is at fault, when
        the file is damaged, a row cannot be used, or ragged columns differ in a row's length.
        """
        self._owners.append(shard.mapping)
        begin = self._rows
        for batch in shard.batches(self._layouts):
            self._add(batch, shard, self._rows - begin)
            self._rows += batch.num_rows
        self._ends.append(self._rows)
        if len(self._ends) == 1:
            # Shards are mostly alike: room for all of them now saves copying later.
            self._reserve(self._rows * self._nbytes // shard.nbytes * 33 // 32)

    def table(self) -> Table:
        columns = {name: self._column(name, layout) for name, layout in self._layouts.items()}
        ragged = any(layout.shape is None for layout in self._layouts.values())
        lengths = self._lengths.values() if ragged else next(iter(columns.values())).lengths
        return Table(
            columns=columns,
            lengths=lengths,
            ends=np.array(self._ends, np.int64),
            null_rows=self._null_rows,
            decoded=self._decoded,
            decoded_from=self._decoded_from,
        )

    def _reserve(self, rows: int) -> None:
        self._lengths.reserve(rows)
        for starts in self._starts.values():
            starts.reserve(rows)

    def _column(self, name: str, layout: Layout) -> Column:
        return Column(
            name=name,
            dtype=layout.dtype,
            starts=self._starts[name].values(),
            lengths=self._lengths.values()
            if layout.shape is None
            else _repeat(layout.shape, self._rows),
            shape=layout.shape,
            owners=self._owners,
        )

    def _add(self, batch: pa.RecordBatch, shard: Shard, first: int) -> None:
        self._ask_for_offsets(batch)
        lead, lengths = "", None
        null = []
        for name, layout in self._layouts.items():
            try:
                found = spans(batch.column(name), layout)
            except RowError as error:
                why = f"row {first + error.row}: column {name}: {error}"
                raise DataError(READ, path=shard.path, why=why) from error
            self._starts[name].append(found.starts)
            self._own(found, shard)
            if found.nulls is not None:
                null.append(found.nulls)
            if found.lengths is None:
                continue
            if lengths is None:
                lead, lengths = name, found.lengths
                self._lengths.append(lengths)
            elif not np.array_equal(lengths, found.lengths):
                row = int((lengths != found.lengths).argmax())
                said = f"{lead} has {lengths[row]} values, {name} {found.lengths[row]}"
                raise _disagreement(shard, first + row, said)
        if null:
            self._null_rows += int(np.count_nonzero(np.logical_or.reduce(null)))

    def _ask_for_offsets(self, batch: pa.RecordBatch) -> None:
        """Have large buffers of offsets read at once, not page by page as they are touched."""
        ragged = [name for name, layout in self._layouts.items() if layout.shape is None]
        buffers = [batch.column(name).buffers()[1] for name in ragged]
        large = [(each.address, each.size) for each in buffers if each and each.size >= _LARGE]
        if large:
            begins, sizes = np.array(large, np.int64).T
            will_need(begins, sizes)

    def _own(self, found: Spans, shard: Shard) -> None:
        if found.values is not None and not shard.holds(found.values):
            self._owners.append(found.values)
            self._decoded += found.values.size
            self._decoded_from = self._decoded_from or shard.path


def _disagreement(shard: Shard, row: int, said: str) -> DataError:
    hint = "Columns of lists that go together have one length a row: name those that do."
    return DataError(READ, path=shard.path, why=f"row {row}: {said}", hint=hint)


def _repeat(shape: tuple[int, ...], rows: int) -> Lengths:
    """Return the lengths of `rows` dense rows, all in the memory of one."""
    return np.broadcast_to(np.int32(math.prod(shape)), (rows,))


class _Growing(Generic[T]):
    """An array that grows at its end. What is reserved and not touched takes no memory."""

    def __init__(self, dtype: type[T]) -> None:
        self._array: NDArray[T] = np.empty(0, dtype)
        self._used = 0

    def append(self, values: NDArray[T]) -> None:
        used = self._used + len(values)
        if used > len(self._array):
            self.reserve(max(used, len(self._array) * 3 // 2))
        self._array[self._used : used] = values
        self._used = used

    def reserve(self, size: int) -> None:
        """Make room for `size` values in all."""
        if size > len(self._array):
            grown = np.empty(size, self._array.dtype)
            grown[: self._used] = self._array[: self._used]
            self._array = grown

    def values(self) -> NDArray[T]:
        """Return what was appended, read-only, as a view."""
        view = self._array[: self._used]
        view.flags.writeable = False
        return view
