"""Reads damaged copies of an Arrow file, each value through its address; prints how it went.

    python tests/support/damage_reader.py FILE SCRATCH SEED COPIES

A copy has some bytes changed, or a part cut out, doubled or zeroed. Each ends as "refused" or
"read"; anything else, and every address outside of what is mapped or held, ends the process with an
error. It runs as a process of its own, since what it looks for would end the interpreter.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa

from protocol.errors import DataError
from trainer.loader.columns import Column
from trainer.loader.rows import Rows, open_rows

# Bytes that lengths, counts and offsets turn wild with.
_WILD = (0x00, 0x01, 0x7F, 0x80, 0xFF)


def damaged(whole: bytes, choice: random.Random) -> bytes:
    """Return a copy with one to four faults."""
    data = bytearray(whole)
    for _ in range(choice.randint(1, 4)):
        place = choice.randrange(len(data))
        size = choice.choice((1, 4, 8, 64))
        kind = choice.randrange(8)
        if kind < 3:
            data[place] ^= 1 << choice.randrange(8)
        elif kind < 5:
            data[place] = choice.choice(_WILD)
        elif kind == 5:
            data[place : place + size] = bytes([choice.choice(_WILD)]) * size
        elif kind == 6:
            del data[place : place + size]
        else:
            data[place:place] = data[place : place + size]
        data = data or bytearray(1)
    return bytes(data)


def check_inside(rows: Rows, column: Column) -> None:
    """Raise AssertionError unless every row's values lie in a mapped file or a held buffer."""
    held = [each if isinstance(each, pa.Buffer) else pa.py_buffer(each) for each in column.owners]
    used = column.lengths > 0
    begins = column.starts[used]
    ends = begins + column.lengths[used].astype(np.int64) * column.dtype.itemsize
    inside = np.zeros(len(begins), bool)
    for buffer in held:
        inside |= (begins >= buffer.address) & (ends <= buffer.address + buffer.size)
    assert inside.all(), f"{(~inside).sum()} rows of {len(rows)} lie outside"


def read(path: Path) -> None:
    rows = open_rows(path)
    for column in rows.columns.values():
        check_inside(rows, column)
        for row in range(len(rows)):
            column.view(row).sum()
    assert len(rows.fingerprint) == 64


def main(file: str, scratch: str, seed: str, copies: str) -> None:
    warnings.simplefilter("ignore")
    whole = Path(file).read_bytes()
    outcomes: collections.Counter[str] = collections.Counter()
    for number in range(int(copies)):
        copy = Path(scratch) / f"{os.getpid()}-{number % 2}"
        copy.unlink(missing_ok=True)
        copy.write_bytes(damaged(whole, random.Random(f"{seed}/{number}")))
        try:
            read(copy)
            outcomes["read"] += 1
        except DataError:
            outcomes["refused"] += 1
        except BaseException:
            print(f"copy {number} of seed {seed}", file=sys.stderr)
            raise
    print(outcomes["read"], outcomes["refused"])


if __name__ == "__main__":
    main(*sys.argv[1:])
