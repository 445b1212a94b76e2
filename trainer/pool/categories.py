"""Columns of strings as a pool needs them: a small code a row, or looked up where they are asked
for.

As numpy arrays of strings they would take four bytes a character, and more than all else together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Strings = NDArray[np.str_]
Codes = NDArray[Any]  # of the smallest unsigned integers that hold them


@dataclass(frozen=True, eq=False)
class Categories:
    """A column of which few values differ: `names`, ascending, and for each row the place of its
    value among them, (rows,)."""

    names: tuple[str, ...]
    codes: Codes

    @classmethod
    def of(cls, arrays: Iterable[pa.Array]) -> Categories:
        """Make one of a column's chunks, strings or a dictionary of them."""
        place: dict[str, int] = {}
        parts = [np.empty(0, dtype=np.int64)]
        for array in arrays:
            encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
            known = [place.setdefault(n, len(place)) for n in encoded.dictionary.to_pylist()]
            parts.append(np.array(known, dtype=np.int64)[encoded.indices.to_numpy()])
        return cls.named(list(place), np.concatenate(parts))

    @classmethod
    def named(cls, names: Sequence[str], codes: Codes) -> Categories:
        """Make one of different names in any order, and codes that are places among them; names
        that no row has are left out."""
        used = np.unique(codes).tolist()
        ordered = sorted(used, key=lambda code: names[code])
        places = np.zeros(len(names), dtype=np.min_scalar_type(len(ordered)))
        places[ordered] = np.arange(len(ordered))
        return cls(tuple(names[code] for code in ordered), places[codes])

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Strings:
        """Return the values of these rows, as they would be chosen from an array."""
        chosen: Strings = np.array(self.names, dtype=np.str_)[self.codes[rows]]
        return chosen

    def is_(self, name: str) -> NDArray[np.bool_]:
        """Return which rows have this value, (rows,)."""
        code = self.names.index(name) if name in self.names else -1
        found: NDArray[np.bool_] = self.codes.astype(np.int64) == code
        return found

    def joined(self, other: Categories, separator: str) -> Categories:
        """Return the column of both values of each row, joined."""
        width = max(len(other.names), 1)
        pairs = self.codes.astype(np.int64) * width + other.codes
        found, codes = np.unique(pairs, return_inverse=True)
        places = [divmod(int(pair), width) for pair in found]
        names = [f"{self.names[a]}{separator}{other.names[b]}" for a, b in places]
        return Categories.named(names, codes)


class Texts:
    """A column of which each value is another: read from its chunks where it is asked for."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: Any) -> Strings:
        """Return the values of these rows, as they would be chosen from an array."""
        wanted = np.arange(len(self))[rows]
        places = np.atleast_1d(wanted)
        owners = np.searchsorted(self._ends, places, side="right")
        values = [
            self._arrays[owner][place - self._ends[owner] + len(self._arrays[owner])].as_py()
            for owner, place in zip(owners.tolist(), places.tolist(), strict=True)
        ]
        chosen: Strings = np.array(values, dtype=np.str_).reshape(np.shape(wanted))
        return chosen

    def chunks(self) -> Iterable[list[str]]:
        """Yield all values, a chunk at a time."""
        return (array.to_pylist() for array in self._arrays)
