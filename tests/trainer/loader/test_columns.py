"""Tests of trainer/loader/columns.py: addresses are those of the values that pyarrow says."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loader.columns import Column, Layout, RowError, layout_of, spans, why_unreadable

NUMBERS = [pa.from_numpy_dtype(code) for code in "bhiqBHIQefd"]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def column(array: pa.Array) -> Column:
    """The array as a column."""
    layout = layout_of(array.type)
    assert layout is not None
    found = spans(array, layout)
    lengths = found.lengths
    if lengths is None:
        lengths = np.full(len(array), layout.width, np.int32)
    return Column(
        name="x",
        dtype=layout.dtype,
        starts=found.starts,
        lengths=lengths,
        shape=layout.shape,
        owners=[array],
    )


def views(array: pa.Array) -> list[Any]:
    read = column(array)
    return [read.view(row).tolist() for row in range(len(read))]


@st.composite
def ragged_arrays(draw: st.DrawFn) -> pa.Array:
    """A list array: any kind and number type, null rows, a slice of a slice, sliced values."""
    kind, number = draw(st.sampled_from(LISTS)), draw(st.sampled_from(NUMBERS))
    rows = draw(st.lists(st.none() | st.lists(st.integers(0, 100), max_size=6), max_size=12))
    array = pa.array(rows, kind(number))
    if kind in (pa.list_, pa.large_list) and draw(st.booleans()):
        array = over_sliced_values(array, draw(st.integers(0, 3)))
    for _ in range(2):
        begin = draw(st.integers(0, len(array)))
        array = array.slice(begin, draw(st.integers(0, len(array) - begin)))
    return array


def over_sliced_values(array: pa.Array, skipped: int) -> pa.Array:
    """The same rows, over values that are a slice."""
    values = pa.concat_arrays([pa.array([99] * skipped, array.type.value_type), array.values])
    return type(array).from_arrays(
        array.offsets, values.slice(skipped), mask=array.is_null() if array.null_count else None
    )


@settings(deadline=None)
@given(ragged_arrays())
def test_rows_of_lists_are_those_that_pyarrow_has(array: pa.Array) -> None:
    assert views(array) == [row or [] for row in array.to_pylist()]
    layout = layout_of(array.type)
    assert layout is not None
    nulls = spans(array, layout).nulls
    assert (0 if nulls is None else nulls.sum()) == array.null_count


@settings(deadline=None)
@given(st.data())
def test_rows_of_a_fixed_shape_are_those_that_pyarrow_has(data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(NUMBERS))
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3))
    rows = data.draw(st.integers(0, 6))
    kind = number
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    made = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape)
    array = pa.array(made.tolist(), kind)
    for _ in range(2):
        begin = data.draw(st.integers(0, len(array)))
        array = array.slice(begin, data.draw(st.integers(0, len(array) - begin)))
    assert views(array) == array.to_pylist()
    layout = layout_of(kind)
    assert layout is not None
    assert layout.shape == tuple(shape)


@settings(deadline=None)
@given(st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), max_size=8))
def test_a_null_value_is_refused_with_its_row_wherever_it_stands(rows: list[Any]) -> None:
    bad = [i for i, row in enumerate(rows) if row and None in row]
    for kind in LISTS:
        array = pa.array(rows, kind(pa.int16()))
        if bad:
            with pytest.raises(RowError, match="null values") as caught:
                column(array)
            assert caught.value.row == bad[0]
            assert views(array[: bad[0]]) == [row or [] for row in rows[: bad[0]]]
        else:
            assert views(array) == [row or [] for row in rows]


def test_nulls_in_the_slots_of_a_null_row_or_outside_of_the_slice_do_no_harm() -> None:
    values, offsets = pa.array([1, None, 3, None, 5], pa.int32()), pa.array([0, 1, 2, 3, 5])
    array = pa.ListArray.from_arrays(
        offsets.cast("int32"), values, mask=pa.array([False, True, False, False])
    )
    assert views(array[:3]) == [[1], [], [3]]
    with pytest.raises(RowError) as caught:
        column(array)
    assert caught.value.row == 3


def test_views_of_a_list_view_may_overlap_and_go_backwards() -> None:
    for make in (pa.ListViewArray, pa.LargeListViewArray):
        integer = pa.int32() if make is pa.ListViewArray else pa.int64()
        array = make.from_arrays(
            pa.array([3, 0, 1], integer), pa.array([2, 4, 0], integer), pa.array([1, 2, 3, 4, 5])
        )
        assert views(array) == [[4, 5], [1, 2, 3, 4], []]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_binary_rows_are_bytes(kind: pa.DataType) -> None:
    array = pa.array([b"ab", None, b"", b"\xff"], kind)
    assert views(array) == [[97, 98], [], [], [255]]
    assert views(array[2:]) == [[], [255]]


def test_a_tensor_has_its_shape_and_one_with_its_axes_permuted_is_refused() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    made = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(made)
    assert array.type == kind
    assert views(array[1:]) == made[1:].tolist()
    assert layout_of(pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[0, 1])) is not None
    assert layout_of(pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])) is None


def test_nulls_in_a_column_of_fixed_shape_are_refused_with_their_row() -> None:
    inner = pa.list_(pa.float32(), 2)
    for rows, kind, bad in (
        ([1.0, 2.0, None], pa.float32(), 2),
        ([[1, 2], None], inner, 1),
        ([[1, 2], [3, None], [5, 6]], inner, 1),
        ([[[1, 2]], [[3, 4]], [None]], pa.list_(inner, 1), 2),
        ([[[1, 2], [3, 4]], [[5, 6], [7, None]]], pa.list_(inner, 2), 1),
    ):
        array = pa.array(rows, kind)
        with pytest.raises(RowError, match="null") as caught:
            column(array)
        assert caught.value.row == bad
        assert len(views(array[:bad])) == bad


REFUSED = [
    pa.bool_(),
    pa.list_(pa.bool_()),
    pa.string(),
    pa.list_(pa.string()),
    pa.list_(pa.list_(pa.int32())),
    pa.list_(pa.list_(pa.int32(), 2)),
    pa.list_(pa.list_(pa.int32()), 2),
    pa.list_(pa.int32(), 0),
    pa.list_(pa.list_(pa.int8(), 2**16), 2**16),
    pa.decimal128(5, 2),
    pa.struct({"a": pa.int32()}),
    pa.map_(pa.int32(), pa.int32()),
    pa.dictionary(pa.int32(), pa.int32()),
    pa.run_end_encoded(pa.int32(), pa.int32()),
    pa.sparse_union([pa.field("a", pa.int32())]),
    pa.list_(pa.date32()),
    pa.timestamp("s"),
    pa.duration("s"),
    pa.time32("s"),
    pa.binary(4),
    pa.binary_view(),
    pa.null(),
    pa.uuid(),
]


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_types_that_are_not_numbers_are_refused_by_name_with_what_is_read(
    kind: pa.DataType,
) -> None:
    assert layout_of(kind) is None
    assert str(kind) in why_unreadable(kind)
    assert "list_view" in why_unreadable(kind)


def test_packed_booleans_and_lists_of_lists_are_told_what_to_become() -> None:
    assert "cast it to fixed_size_list" in why_unreadable(pa.list_(pa.list_(pa.int8())))
    assert "cast it to uint8" in why_unreadable(pa.list_(pa.bool_()))


def with_offsets(offsets: list[int], make: Any, integer: str, values: int = 4) -> pa.Array:
    """A list array over offsets that nobody checked."""
    return unchecked(make(pa.int8()), [np.array(offsets, integer)], values=values)


def unchecked(kind: pa.DataType, buffers: list[Any], *, values: int) -> pa.Array:
    """An array over `buffers`, which are put in place after pyarrow's own check."""
    rows = len(buffers[0]) - (len(buffers) == 1)
    held = [np.zeros_like(buffer) for buffer in buffers]
    numbers = pa.array(range(values), pa.int8())
    made = [None, *map(pa.py_buffer, held)]
    array = pa.Array.from_buffers(kind, rows, made, children=[numbers])
    for place, buffer in zip(held, buffers, strict=True):
        place[:] = buffer
    return array


@pytest.mark.parametrize(("make", "integer"), [(pa.list_, "int32"), (pa.large_list, "int64")])
def test_offsets_that_leave_the_values_are_refused_with_their_row(make: Any, integer: str) -> None:
    low, high = np.iinfo(integer).min, np.iinfo(integer).max
    for offsets, row in (
        ([0, 2, 1, 4], 1),
        ([0, 2, 3, 5], 2),
        ([-1, 2, 3, 4], 0),
        ([0, high, low, 4], 1),
        ([low, high, high, 4], 0),
        ([0, 1, high, 4], 2),
    ):
        with pytest.raises(RowError, match="outside of its values") as caught:
            column(with_offsets(offsets, make, integer))
        assert caught.value.row == row
    assert views(with_offsets([1, 2, 2, 4], make, integer)) == [[1], [], [2, 3]]


@pytest.mark.parametrize(
    ("make", "integer"), [(pa.list_view, "int32"), (pa.large_list_view, "int64")]
)
def test_views_that_leave_the_values_are_refused_with_their_row(make: Any, integer: str) -> None:
    high = np.iinfo(integer).max
    for begins, sizes in (([0, 3], [1, 2]), ([0, -1], [1, 1]), ([0, 1], [1, -1])):
        for wild in (0, high, -high):
            arrays = [np.array(each, integer) for each in (begins, sizes)]
            arrays[0][1] += wild if wild != high else 0
            arrays[1][1] |= wild if wild == high else 0
            array = unchecked(make(pa.int8()), arrays, values=4)
            with pytest.raises(RowError, match="outside of its values") as caught:
                column(array)
            assert caught.value.row == 1


def test_a_row_of_more_values_than_an_int32_counts_is_refused() -> None:
    # Null values would be found first, and 2 GiB of them are no memory: the array only claims them.
    claimed = pa.Array.from_buffers(pa.int8(), 2**31, [None, pa.foreign_buffer(4096, 2**31)])
    offsets = pa.py_buffer(np.array([0, 2**31], np.int64))
    array = pa.Array.from_buffers(pa.large_list(pa.int8()), 1, [None, offsets], children=[claimed])
    with pytest.raises(RowError, match="2147483648 values"):
        column(array)


def test_a_view_is_read_only_and_keeps_its_memory() -> None:
    read = column(pa.array([[1, 2, 3]], pa.list_(pa.int32())))
    view = read.view(0)
    assert view.ctypes.data == read.starts[0]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    del read
    gc.collect()
    assert view.tolist() == [1, 2, 3]
    assert ctypes.c_int32.from_address(view.ctypes.data).value == 1


def test_a_row_that_is_not_there_is_an_index_error() -> None:
    read = column(pa.array([[1]], pa.list_(pa.int32())))
    with pytest.raises(IndexError):
        read.view(1)


def test_a_layout_reads_as_a_type() -> None:
    assert str(Layout(dtype=np.dtype("int32"), shape=None)) == "int32[ragged]"
    assert str(Layout(dtype=np.dtype("float32"), shape=(2, 3))) == "float32[2, 3]"
