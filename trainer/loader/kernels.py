"""Copies of rows from where they lie in memory into a batch: numba's machine code, or numpy.

A row is an address and a number of values. Both kernels do the same; `choose` takes the compiled
one where numba is installed (the extra `fast`). They let other threads run while they copy.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import UsageError

Addresses = NDArray[np.int64]
Counts = NDArray[np.int64]
Values = NDArray[Any]


class Kernel(StrEnum):
    """What copies."""

    AUTO = "auto"
    NUMBA = "numba"
    NUMPY = "numpy"


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of one column, and where they go: row i is `counts[i]` values of `dtype` from the
    address `starts[i]` on. The caller answers for the addresses."""

    starts: Addresses
    counts: Counts
    dtype: np.dtype[Any]
    out: Values


Copy = Callable[[Sequence[Move]], None]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`pad` copies row i to the beginning of `out[i]`, and zeros the rest of that line; `out` is
    (n, width) and C-contiguous. `pack` copies rows one after another into `out`, (sum of counts,).

    Values of another dtype than that of `out` are converted. All moves have as many rows.
    """

    name: Kernel
    pad: Copy
    pack: Copy


def choose(kernel: Kernel) -> Kernels:
    """Return the kernels of that name. Raises UsageError when numba is wanted and not installed."""
    there = importlib.util.find_spec("numba") is not None
    if kernel is Kernel.NUMBA and not there:
        why = "numba is not installed"
        raise UsageError("choose the loader's kernel", why=why, hint="pip install 'syncd[fast]'")
    if kernel is Kernel.NUMPY or not there:
        return Kernels(name=Kernel.NUMPY, pad=pad, pack=pack)
    from trainer.loader import compiled

    return Kernels(name=Kernel.NUMBA, pad=compiled.pad, pack=compiled.pack)


def pad(moves: Sequence[Move]) -> None:
    """See `Kernels`."""
    for move in moves:
        move.out.fill(0)
        for line, values in zip(move.out, _views(move), strict=True):
            line[: len(values)] = values


def pack(moves: Sequence[Move]) -> None:
    """See `Kernels`."""
    for move in moves:
        if len(move.starts):
            np.concatenate(_views(move), out=move.out, casting="unsafe")


def _views(move: Move) -> list[Values]:
    """Return the rows as arrays.

    All are slices of one array that reaches from the first address to the last, over memory that
    may not be there and is not touched: a slice costs a tenth of an array made from an address.
    """
    starts, dtype = move.starts, move.dtype
    if not len(starts):
        return []
    first, stops = int(starts.min()), starts + move.counts * dtype.itemsize
    reach = int(stops.max()) - first
    span = np.ctypeslib.as_array((ctypes.c_uint8 * reach).from_address(first))
    bounds = zip((starts - first).tolist(), (stops - first).tolist(), strict=True)
    return [span[start:stop].view(dtype) for start, stop in bounds]
