import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.loader import kernels
from trainer.loader.kernels import Kernel, Kernels, Move, choose

KERNELS = [choose(Kernel.NUMPY), choose(Kernel.NUMBA)]
TYPES = ("int8", "int32", "int64", "float16")
both = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
a_dtype = st.sampled_from(TYPES).map(np.dtype)
rows = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def scattered(counts: list[int], dtype: np.dtype) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of these lengths, each somewhere in memory, and their addresses."""
    drawn = np.random.default_rng(sum(counts))
    values = [drawn.integers(0, 100, count + 8).astype(dtype) for count in counts]
    starts = np.array([each.ctypes.data for each in values], dtype=np.int64)
    return values, starts


@both
@settings(deadline=None)  # the first call of each pair of types compiles
@given(counts=rows, dtype=a_dtype, other=a_dtype, spare=st.integers(0, 3))
def test_padded_rows_are_copied_and_what_is_behind_them_is_zero(
    kernel: Kernels, counts: list[int], dtype: np.dtype, other: np.dtype, spare: int
):
    values, starts = scattered(counts, dtype)
    out = np.full((len(counts), max(counts) + spare), 77, dtype=other)
    kernel.pad([Move(starts, np.array(counts, dtype=np.int64), dtype, out)])
    for line, count, each in zip(out, counts, values, strict=True):
        assert (line[:count] == each[:count].astype(other)).all()
        assert (line[count:] == 0).all()


@both
@settings(deadline=None)  # the first call of each pair of types compiles
@given(counts=rows, dtype=a_dtype, other=a_dtype)
def test_packed_rows_stand_one_after_another(
    kernel: Kernels, counts: list[int], dtype: np.dtype, other: np.dtype
):
    values, starts = scattered(counts, dtype)
    out = np.full(sum(counts), 77, dtype=other)
    kernel.pack([Move(starts, np.array(counts, dtype=np.int64), dtype, out)])
    wanted = [each[:count] for count, each in zip(counts, values, strict=True)]
    assert (out == np.concatenate(wanted).astype(other)).all()


@both
def test_bits_are_copied_as_they_are(kernel: Kernels):
    values = np.array([np.nan, -0.0, np.inf, 1e-320])
    out = np.empty((1, 4))
    kernel.pad([Move(np.array([values.ctypes.data]), np.array([4]), values.dtype, out)])
    assert out.tobytes() == values.tobytes()


@both
def test_no_rows_are_no_copy(kernel: Kernels):
    none = np.empty(0, dtype=np.int64)
    dtype = np.dtype("int32")
    kernel.pack([Move(none, none, dtype, np.empty(0, dtype))])
    kernel.pad([Move(none, none, dtype, np.empty((0, 4), dtype))])
    kernel.pad([])


@both
def test_several_columns_are_copied_at_once(kernel: Kernels):
    counts = np.array([3, 0, 5])
    moves = []
    for dtype in ("int32", "int8", "int64"):
        values, starts = scattered(counts.tolist(), np.dtype(dtype))
        out = np.full((3, 6), 77, dtype="int64" if dtype == "int8" else dtype)
        moves.append((values, Move(starts, counts, np.dtype(dtype), out)))
    kernel.pad([move for _, move in moves])
    for values, move in moves:
        for line, count, each in zip(move.out, counts, values, strict=True):
            assert line.tolist() == [*each[:count].tolist(), *[0] * (6 - count)]


def test_the_compiled_kernel_is_chosen_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    assert choose(Kernel.AUTO).name is Kernel.NUMBA
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert choose(Kernel.AUTO).name is Kernel.NUMPY
    with pytest.raises(UsageError, match=r"syncd\[fast\]"):
        choose(Kernel.NUMBA)
