"""The kernels of `kernels.py` as machine code, by numba; the code is kept for the next process.

Values that stay as they are are copied by `memcpy`, which is more than twice as fast as the loop
that numba makes of an assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from trainer.loader import kernels
from trainer.loader.kernels import Move

_HALF = np.dtype(np.float16)  # numba does not compute with it on a CPU


@intrinsic
def _memcpy(context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        into, out_of = (builder.inttoptr(each, pointer) for each in arguments[:2])
        cgutils.raw_memcpy(builder, into, out_of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _zero(context: Any, target: Any, nbytes: Any) -> Any:
    """Set `nbytes` from an address on to zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        into = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        cgutils.memset(builder, into, arguments[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _values_at(context: Any, address: Any, like: Any) -> Any:
    """Return a pointer to values of the dtype of `like`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


@numba.njit(nogil=True, cache=True)
def _pad(starts: Any, lengths: Any, outs: Any, widths: Any) -> None:
    for c in range(outs.size):
        out = outs[c]
        for i in range(starts.shape[1]):
            _memcpy(out, starts[c, i], lengths[c, i])
            _zero(out + lengths[c, i], widths[c] - lengths[c, i])
            out += widths[c]


@numba.njit(nogil=True, cache=True)
def _pack(starts: Any, lengths: Any, outs: Any) -> None:
    for c in range(outs.size):
        out = outs[c]
        for i in range(starts.shape[1]):
            _memcpy(out, starts[c, i], lengths[c, i])
            out += lengths[c, i]


@numba.njit(nogil=True, cache=True)
def _pad_converted(starts: Any, counts: Any, like: Any, out: Any) -> None:
    for i in range(starts.size):
        values = numba.carray(_values_at(starts[i], like), (counts[i],))
        for j in range(counts[i]):
            out[i, j] = values[j]
        out[i, counts[i] :] = 0


@numba.njit(nogil=True, cache=True)
def _pack_converted(starts: Any, counts: Any, like: Any, out: Any) -> None:
    at = 0
    for i in range(starts.size):
        values = numba.carray(_values_at(starts[i], like), (counts[i],))
        for j in range(counts[i]):
            out[at + j] = values[j]
        at += counts[i]


def pad(moves: Sequence[Move]) -> None:
    """See `kernels.Kernels`: all columns in one call, so that other threads run for longer."""
    plain = [move for move in moves if move.dtype == move.out.dtype]
    if plain:
        widths = [move.out.shape[1] * move.dtype.itemsize for move in plain]
        _pad(*_places(plain), np.array(widths))
    for move in moves:
        if move.dtype == move.out.dtype:
            continue
        if _HALF in (move.dtype, move.out.dtype):
            kernels.pad([move])
        else:
            _pad_converted(move.starts, move.counts, np.empty(0, move.dtype), move.out)


def pack(moves: Sequence[Move]) -> None:
    """See `kernels.Kernels`."""
    plain = [move for move in moves if move.dtype == move.out.dtype]
    if plain:
        _pack(*_places(plain))
    for move in moves:
        if move.dtype == move.out.dtype:
            continue
        if _HALF in (move.dtype, move.out.dtype):
            kernels.pack([move])
        else:
            _pack_converted(move.starts, move.counts, np.empty(0, move.dtype), move.out)


def _places(
    moves: Sequence[Move],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return, by column, the addresses of rows and their bytes, (c, n), and where they go, (c,)."""
    starts = np.array([move.starts for move in moves])
    lengths = np.array([move.counts * move.dtype.itemsize for move in moves])
    # `array.ctypes.data` takes four times as long, a tenth of a batch.
    outs = np.array([move.out.__array_interface__["data"][0] for move in moves])
    return starts, lengths, outs
