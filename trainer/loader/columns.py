"""Columns: where the values of each row lie in memory, as addresses into the mapped files.

`layout_of` says which Arrow types are read and as what; `spans` turns one Arrow array into
addresses and lengths, and checks every offset on the way, since a wrong one would make a copy read
foreign memory. Neither reads a value.

Chunks are never combined: a `list` column ends at 2^31 - 1 child values, and joining chunks fails
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Addresses = NDArray[np.int64]
Lengths = NDArray[np.int32]

LONGEST = 2**31 - 1
READABLE = (
    "read are whole numbers and floats of 8 to 64 bits: single, or in list, large_list, list_view, "
    "large_list_view, fixed_size_list (also nested) and fixed_shape_tensor; and binary as bytes"
)

_NUMBERS: dict[pa.DataType, np.dtype] = {
    pa.from_numpy_dtype(code): np.dtype(code) for code in "bhiqBHIQefd"
}
_LISTS = frozenset({"list", "large_list", "list_view", "large_list_view"})


class RowError(ValueError):
    """A row of an array cannot be used: `row` is its place in the array, `str()` says why."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a row of a column is: `dtype` of one value, and `shape`, or None where it is ragged."""

    dtype: np.dtype
    shape: tuple[int, ...] | None

    @property
    def width(self) -> int:
        """How many values each row has; only of a dense column."""
        return math.prod(self.shape or ())

    def __str__(self) -> str:
        return (
            f"{self.dtype}[{'ragged' if self.shape is None else ', '.join(map(str, self.shape))}]"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """Where each row's values lie in memory. Zero copies: addresses into the mapped files.

    `starts` (rows,) holds the address of each row's first value, aligned to `dtype`; of a row
    without values it means nothing. `lengths` (rows,) counts its values: of dense rows the product
    of `shape`, as an array of stride 0. `shape` is that of every row, `()` for single numbers, or
    None where rows are ragged. `owners` keep the memory mapped for as long as the column lives.
    """

    name: str
    dtype: np.dtype
    starts: Addresses
    lengths: Lengths
    shape: tuple[int, ...] | None
    owners: Sequence[object]

    def __len__(self) -> int:
        return len(self.starts)

    def view(self, row: int) -> NDArray[np.generic]:
        """Return the values of `row`, read-only, without a copy: (lengths[row],) or `shape`.

        The view keeps the file mapped. Raises IndexError when there is no such row.
        """
        shape = (int(self.lengths[row]),) if self.shape is None else self.shape
        if 0 in shape:
            return np.empty(shape, self.dtype)
        return np.asarray(_Window(int(self.starts[row]), shape, self.dtype, self.owners))


class _Window:
    """Memory at an address, as NumPy's array interface (version 3) describes it; read-only."""

    __slots__ = ("__array_interface__", "_owners")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype, owners: Sequence[object]
    ) -> None:
        self._owners = owners
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "typestr": dtype.str,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """The rows of one array: `starts` (n,), `lengths` (n,) if ragged, and the values' buffer.

    `nulls` (n,) says which rows are null, where any is.
    """

    starts: Addresses
    lengths: Lengths | None = None
    values: pa.Buffer | None = None
    nulls: NDArray[np.bool_] | None = None


def layout_of(arrow_type: pa.DataType) -> Layout | None:
    """Return how rows of `arrow_type` are read, or None when they are not."""
    shape: tuple[int, ...] | None = ()
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        shape = _tensor_shape(arrow_type)
        inner = arrow_type.value_type
    else:
        inner = _storage_type(arrow_type)
        if _kind(inner) in _LISTS:
            shape, inner = None, inner.value_type
        elif _kind(inner) in ("binary", "large_binary"):
            shape, inner = None, pa.uint8()
        elif _kind(inner) == "fixed_size_list":
            shape, inner = _nested_shape(inner)
    dtype = _NUMBERS.get(inner)
    if dtype is None or (shape is not None and not 0 < math.prod(shape) <= LONGEST):
        return None
    return Layout(dtype=dtype, shape=shape)


def why_unreadable(arrow_type: pa.DataType) -> str:
    """Return why a column of a type without layout is not read, and what is."""
    inner, depth = _storage_type(arrow_type), 0
    while _kind(inner) in _LISTS | {"fixed_size_list"}:
        inner, depth = inner.value_type, depth + 1
    if pa.types.is_boolean(inner):
        return f"{arrow_type} packs eight values in a byte: cast it to uint8; {READABLE}"
    if depth > 1 and inner in _NUMBERS:
        return f"{arrow_type} has no one shape: cast it to fixed_size_list; {READABLE}"
    return f"{arrow_type} is not read as numbers; {READABLE}"


def is_binary(arrow_type: pa.DataType) -> bool:
    """Say whether rows are bytes of unknown meaning: read when asked for by name."""
    return _kind(_storage_type(arrow_type)) in ("binary", "large_binary")


def spans(array: pa.Array, layout: Layout) -> Spans:
    """Return where the rows of `array` lie; its type has `layout`, its buffers' sizes are checked.

    A null row of a ragged column counts as empty. Raises RowError when a row has null values, when
    a null row has to have a shape, when offsets descend or leave the values, and when a row is
    longer than 2^31 - 1 values.
    """
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not len(array):
        empty = np.empty(0, np.int32) if layout.shape is None else None
        return Spans(starts=np.empty(0, np.int64), lengths=empty)
    return _dense(array, layout) if layout.shape is not None else _ragged(array, layout)


def _dense(array: pa.Array, layout: Layout) -> Spans:
    rows = len(array)
    _refuse_nulls(array, rows, "it is null, and rows of this column have a fixed shape")
    while _kind(array.type) == "fixed_size_list":
        # `.values` is all of the child, whatever the offset of the parent.
        size = array.type.list_size
        array = array.values.slice(array.offset * size, len(array) * size)
        _refuse_nulls(array, rows, "it has null values")
    buffer = array.buffers()[1]
    item = layout.dtype.itemsize
    first = buffer.address + array.offset * item
    starts = first + np.arange(rows, dtype=np.int64) * (layout.width * item)
    return Spans(starts=starts, values=buffer)


def _refuse_nulls(array: pa.Array, rows: int, why: str) -> None:
    if array.null_count:
        first = int(_nulls(array).argmax())
        raise RowError(first // (len(array) // rows), why)


def _ragged(array: pa.Array, layout: Layout) -> Spans:
    binary = is_binary(array.type)
    child = None if binary else array.values
    values = array.buffers()[2] if child is None else child.buffers()[1]
    available = (values.size if values else 0) if child is None else len(child)
    nulls = _nulls(array) if array.null_count else None
    begins, lengths = _begins_and_lengths(array, available, nulls)
    if child is not None and child.null_count:
        _refuse_null_values(child, begins, lengths)
    item = layout.dtype.itemsize
    base = (values.address if values else 0) + (child.offset * item if child is not None else 0)
    starts = np.multiply(begins, item, dtype=np.int64)
    starts += base
    short: Lengths = lengths.astype(np.int32, copy=False)
    return Spans(starts=starts, lengths=short, values=values, nulls=nulls)


def _begins_and_lengths(
    array: pa.Array, available: int, nulls: NDArray[np.bool_] | None
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return the first value and the number of values of each row, all within `available`."""
    dtype = np.dtype(np.int64 if _kind(array.type).startswith("large") else np.int32)
    rows = len(array)

    def integers(number: int, count: int) -> NDArray[np.integer]:
        buffer = array.buffers()[number]
        return np.frombuffer(buffer, dtype, count, array.offset * dtype.itemsize)

    if _kind(array.type).endswith("list_view"):
        begins, lengths = integers(1, rows), integers(2, rows)
        if nulls is not None:
            begins = np.where(nulls, 0, begins)
            lengths = np.where(nulls, 0, lengths)
        bad = (begins < 0) | (lengths < 0) | (lengths > available)
        bad |= begins > available - lengths.astype(np.int64)
    else:
        offsets = integers(1, rows + 1)
        begins, ends = offsets[:-1], offsets[1:]
        # Compared, since the differences of wild offsets would wrap around.
        bad = begins > ends
        bad[0] |= begins[0] < 0
        bad[-1] |= ends[-1] > available
        lengths = ends - begins if nulls is None else np.where(nulls, 0, ends - begins)
    if bad.any():
        raise RowError(int(bad.argmax()), "its offsets lie outside of its values: it is damaged")
    if dtype.itemsize == 8 and lengths.max() > LONGEST:
        raise RowError(int(lengths.argmax()), f"it has {lengths.max()} values, 2^31 - 1 is most")
    return begins, lengths


def _refuse_null_values(
    child: pa.Array, begins: NDArray[np.integer], lengths: NDArray[np.integer]
) -> None:
    at = np.flatnonzero(_nulls(child))
    inside = np.searchsorted(at, begins + lengths.astype(np.int64)) > np.searchsorted(at, begins)
    inside &= lengths > 0
    if inside.any():
        raise RowError(int(inside.argmax()), "it has null values")


def _nulls(array: pa.Array) -> NDArray[np.bool_]:
    """Return which rows are null, by the bitmap: `to_numpy` would import pandas for it."""
    byte, bit = divmod(array.offset, 8)
    bitmap = np.frombuffer(array.buffers()[0], np.uint8, offset=byte)
    valid = np.unpackbits(bitmap, bitorder="little", count=bit + len(array))
    mask: NDArray[np.bool_] = valid[bit:] == 0
    return mask


def _kind(arrow_type: pa.DataType) -> str:
    """Return the type's name without its parameters: "list", "large_list_view", "int32"."""
    return _KINDS.get(arrow_type.id, "")


_KINDS = {
    pa.lib.Type_LIST: "list",
    pa.lib.Type_LARGE_LIST: "large_list",
    pa.lib.Type_LIST_VIEW: "list_view",
    pa.lib.Type_LARGE_LIST_VIEW: "large_list_view",
    pa.lib.Type_FIXED_SIZE_LIST: "fixed_size_list",
    pa.lib.Type_BINARY: "binary",
    pa.lib.Type_LARGE_BINARY: "large_binary",
}


def _storage_type(arrow_type: pa.DataType) -> pa.DataType:
    while isinstance(arrow_type, pa.BaseExtensionType):
        arrow_type = arrow_type.storage_type
    return arrow_type


def _tensor_shape(arrow_type: pa.FixedShapeTensorType) -> tuple[int, ...]:
    """Return the shape in memory; one without values, so unreadable, if axes are permuted."""
    permutation = arrow_type.permutation
    plain = permutation is None or list(permutation) == sorted(permutation)
    return tuple(arrow_type.shape) if plain else (0,)


def _nested_shape(arrow_type: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    shape: list[int] = []
    while _kind(arrow_type) == "fixed_size_list":
        shape.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    return tuple(shape), arrow_type
