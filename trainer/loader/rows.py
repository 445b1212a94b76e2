"""Rows: the number columns of many Arrow files as one table, opened without reading the values.

    rows = open_rows(Path("data"), columns=["input_ids", "loss_mask"])
    rows.columns["input_ids"].view(17)  # int32 (length,), a view of the mapped file

What is held beside the page cache: 8 bytes a row and column for addresses and 4 a row for the
lengths that ragged columns share; 8 more a row under an indices file; and what had to be decoded.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataError, UsageError
from trainer.loader.arrow import READ, Shard, open_shard
from trainer.loader.columns import Column, Lengths, layout_of
from trainer.loader.folders import Found, Paths, find_shards
from trainer.loader.preload import preload_shards, will_need
from trainer.loader.schema import check_same, choose
from trainer.loader.table import Table, TableBuilder

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What to open again in another process."""

    paths: str | tuple[str, ...]
    columns: tuple[str, ...] | None


class Rows:
    """The rows of one or many files, in order; made by `open_rows`.

    `columns` are in the order asked for. `lengths` (rows,) are those of the ragged columns, which
    agree; with none, those of the first column. `left_out` says why each other column is not here.
    `null_rows` counts the rows of the files in which a ragged column is null; they have length 0.
    `nbytes` is the size of the mapped files, `decoded` what of the values is in memory instead.

    Pickled, it is its paths and columns, and is opened again where it is unpickled: that raises
    DataError when it is not the same any more. Safe to read from many threads, and after a fork.
    """

    def __init__(
        self,
        *,
        recipe: _Recipe,
        shards: Sequence[Shard],
        table: Table,
        left_out: Mapping[str, str],
        indices: Indices | None,
    ) -> None:
        self._recipe = recipe
        self._shards = shards
        self._ends = table.ends
        self._indices = indices
        self.columns: Mapping[str, Column] = table.columns
        self.lengths: Lengths = table.lengths
        self.null_rows = table.null_rows
        self.decoded = table.decoded
        self.left_out = left_out
        self.nbytes = sum(shard.nbytes for shard in shards)

    def __len__(self) -> int:
        return len(self.lengths)

    def where(self, row: int) -> str:
        """Say where `row` is, for errors: "train-00003-of-00008.arrow, row 17", counted from 0.

        Raises IndexError when there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        stored = row if self._indices is None else int(self._indices[row])
        number = int(np.searchsorted(self._ends, stored, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return f"{self._shards[number].path.name}, row {stored - first}"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, hex, of the files' names, sizes and rows, the columns' types, and all lengths.

        The same for the same data in another folder, and whatever the order of the columns. Values
        are not read: files that differ in nothing but values have one fingerprint.
        """
        counts = np.diff(self._ends, prepend=0)
        digest = hashlib.sha256()
        for shard, count in zip(self._shards, counts, strict=True):
            digest.update(f"{shard.path.name!r} {shard.nbytes} {count}\n".encode())
        for name, column in sorted(self.columns.items()):
            digest.update(f"{name!r} {column.dtype} {column.shape}\n".encode())
        digest.update(np.ascontiguousarray(self.lengths).data)
        if self._indices is not None:
            digest.update(self._indices.data)
        return digest.hexdigest()

    def preload(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Bring the files into the page cache, in order; return whether all of it was read.

        Does nothing when they do not fit in the memory that is available. `stop` is asked every
        8 MiB and ends it by returning True (a `threading.Event`'s `is_set`). Takes no memory
        beyond the page cache. Raises DataError when a file cannot be read.
        """
        return preload_shards(self._shards, stop)

    def will_need(self, rows: NDArray[np.int64]) -> None:
        """Ask the system to read the values of `rows` ahead of their use; returns before it has.

        Worth it where `preload` did nothing: on a cold disk a batch asked for one batch ahead came
        10 times sooner. Costs about 1 µs a row and column, which is lost when all is cached.
        """
        for column in self.columns.values():
            sizes = column.lengths[rows].astype(np.int64) * column.dtype.itemsize
            will_need(column.starts[rows][sizes > 0], sizes[sizes > 0])

    def check_sizes(self) -> None:
        """Raise DataError when a mapped file was cut short since: reading on would end in SIGBUS.

        A file that was replaced by another is read on as it was. One system call a file.
        """
        for shard in self._shards:
            shard.check_size()

    def __reduce__(self) -> tuple[Callable[..., Rows], tuple[_Recipe, str]]:
        return _open_again, (self._recipe, self.fingerprint)


def open_rows(paths: Paths, *, columns: Sequence[str] | None = None) -> Rows:
    """Open Arrow IPC files: one, several, a folder of them, or a `datasets` `save_to_disk` folder.

    Reads metadata, offsets and, where there are any, validity bitmaps; values stay where they are.
    `columns` are those to read, in order; with None all that hold numbers. Shards are read in the
    order given, those of a folder by name. A row without values is kept, with length 0; so is a
    null row of a ragged column. Warns, once, with how much was decoded into memory because it was
    compressed or else cannot be mapped; and for each stream whose end is not marked.

    Raises UsageError when the call is wrong: no path, or a column that is not there or cannot be
    read. Raises DataError, which names the file, when one is missing, damaged, cut short or not
    Arrow, when shards differ in a column's type, and (with the row) when a row has null values, a
    null stands in a column of fixed shape, or ragged columns differ in a row's length.
    """
    asked = _asked(columns)
    recipe = _Recipe(paths=_absolute(paths), columns=asked)
    found = find_shards(recipe.paths)
    shards = [open_shard(path) for path in found.shards]
    choice = choose(shards[0], asked)
    builder = TableBuilder(choice.layouts, sum(shard.nbytes for shard in shards))
    for shard in shards:
        check_same(shards[0], shard, choice.layouts)
        builder.add(shard)
    table = builder.table()
    indices = _read_indices(found, len(table.lengths))
    if table.decoded:
        _warn_of_decoding(table)
    return Rows(
        recipe=recipe,
        shards=shards,
        table=table if indices is None else table.select(indices),
        left_out=choice.left_out,
        indices=indices,
    )


def _open_again(recipe: _Recipe, fingerprint: str) -> Rows:
    rows = open_rows(recipe.paths, columns=recipe.columns)
    if rows.fingerprint != fingerprint:
        path = recipe.paths if isinstance(recipe.paths, str) else recipe.paths[0]
        why = "the files are not those that were opened first"
        raise DataError(READ, path=path, why=why, hint="Start again with the files as they are.")
    return rows


def _asked(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise UsageError(READ, why=f"columns is a name, not a list: write [{columns!r}]")
    if not columns:
        raise UsageError(READ, why="columns is empty", hint="None stands for all that are numbers.")
    if len(set(columns)) < len(columns):
        raise UsageError(READ, why=f"columns names one twice: {', '.join(columns)}")
    return tuple(columns)


def _absolute(paths: Paths) -> str | tuple[str, ...]:
    if isinstance(paths, str | os.PathLike):
        return os.path.abspath(paths)
    return tuple(os.path.abspath(path) for path in paths)


def _warn_of_decoding(table: Table) -> None:
    text = (
        f"{table.decoded / 1e6:.1f} MB of values had to be decoded into memory, beginning with "
        f"{table.decoded_from}: buffers that are compressed (or of another byte order, or not "
        "aligned) cannot be mapped; write the files without compression to avoid it"
    )
    warnings.warn(text, stacklevel=3)


def _read_indices(found: Found, rows: int) -> Indices | None:
    """Return the row numbers in the indices files, each checked to be one of `rows`."""
    if not found.indices:
        return None
    parts = [_indices_of(path) for path in found.indices]
    indices = np.concatenate(parts)
    if indices.size and (indices.min() < 0 or indices.max() >= rows):
        why = f"it has row numbers beyond the {rows} rows of the shards"
        raise DataError(READ, path=found.indices[0], why=why)
    return indices


def _indices_of(path: Path) -> Indices:
    shard = open_shard(path)
    names = shard.schema.names
    layout = layout_of(shard.schema.field(0).type) if len(names) == 1 else None
    if layout is None or layout.shape != () or layout.dtype.kind not in "iu":
        raise DataError(READ, path=path, why="an indices file has one column of whole numbers")
    parts = [np.empty(0, np.int64)]
    for batch in shard.batches(names):
        column, size = batch.column(0), layout.dtype.itemsize
        if column.null_count:
            raise DataError(READ, path=path, why="it has nulls among its row numbers")
        if len(column):
            values = column.buffers()[1]
            numbers = np.frombuffer(values, layout.dtype, len(column), column.offset * size)
            # Numbers beyond 2^63 turn negative, and are refused with the others that are no rows.
            parts.append(numbers.astype(np.int64))
    return np.concatenate(parts)
