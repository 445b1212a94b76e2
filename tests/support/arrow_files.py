"""Arrow files for the loader's tests: written whole, sparse, and read back as addresses say."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.loader.rows import Rows


def tokens(rows: Sequence[Sequence[int] | None], kind: Any = None) -> pa.Array:
    return pa.array(rows, kind or pa.list_(pa.int32()))


def write(
    path: Path,
    *batches: pa.RecordBatch | pa.Table,
    stream: bool = False,
    options: pa.ipc.IpcWriteOptions | None = None,
    rows: int | None = None,
) -> Path:
    """Write `batches` to `path`, each as one record batch, or tables in batches of `rows`."""
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write(batch) if rows is None else writer.write_table(batch, rows)
    return path


def streamed(*batches: pa.RecordBatch) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def values(rows: Rows, name: str) -> list[Any]:
    """Every row of a column, read through its views."""
    column = rows.columns[name]
    return [column.view(row).tolist() for row in range(len(rows))]


class SparseFile(io.RawIOBase):
    """A file in which large blocks of zeros are holes."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")
        self._hole = bytes(64)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        block = memoryview(data).cast("B")
        # Of the tests' large blocks, those that begin and end with zeros are zero throughout.
        if len(block) > 2**16 and block[:64] == self._hole and block[-64:] == self._hole:
            self._file.seek(len(block), io.SEEK_CUR)
        else:
            self._file.write(block)
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.truncate(self._file.tell())
            self._file.close()
        super().close()


def write_sparse(path: Path, *, batches: int, rows: int, length: int) -> Path:
    """Write int32 rows of `length` zeros, which take space on disk for their offsets alone."""
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * length)
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(rows * length, np.int32)))
    batch = pa.record_batch([ids], names=["ids"])
    with SparseFile(path) as sink, pa.ipc.new_file(pa.PythonFile(sink, "w"), batch.schema) as out:
        for _ in range(batches):
            out.write_batch(batch)
    return path
