"""Opening Arrow IPC files: memory-mapped, told apart by their bytes, refused with the reason.

The file format and the stream format are both read, whatever the file is called. A file is mapped
once, whole and read-only; record batches are views of the mapping. Opening touches metadata only.

The batches of a file are read as the stream that lies between its magic and its footer: asked for
some of the columns, pyarrow's reader of the file format copies them into memory, the one of streams
does not. The footer says how many batches there have to be.

A mapping stays with the file it was made of. A file that is replaced (written elsewhere and renamed
over it) or deleted is read on as it was. One that is cut short in place is gone from under the
mapping: the system answers a read of the missing part with SIGBUS, which ends the process. Nothing
in user space prevents that; `Shard.check_size` asks again at the price of one system call.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pyarrow as pa

from protocol.errors import DataError
from trainer.files import reason

READ = "read Arrow rows"

_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)
_HEAD = 64
_SMALLEST_FILE = 2 * len(_FILE_MAGIC) + 6  # magic padded to 8, footer's length, magic

# What else is given by mistake, by its first bytes.
_FOREIGN = {
    b"PAR1": "a Parquet file",
    b"FEA1": "a Feather file of version 1",
    b"ORC": "an ORC file",
    b"\x1f\x8b": "compressed as a whole with gzip",
    b"\x28\xb5\x2f\xfd": "compressed as a whole with zstd",
    b"\x04\x22\x4d\x18": "compressed as a whole with LZ4",
    b"BZh": "compressed as a whole with bzip2",
    b"\xfd7zXZ": "compressed as a whole with xz",
    b"PK\x03\x04": "a zip archive (perhaps .npz or .pt)",
    b"\x93NUMPY": "a NumPy file",
    b"\x89HDF": "an HDF5 file",
    b"version https://git-lfs": "a Git LFS pointer whose content was not fetched",
    b"{": "JSON",
    b"[": "JSON",
}
_HINTS = {
    "a Parquet": "Convert it: pyarrow.parquet.read_table, then pyarrow.ipc.new_file.",
    "a Feather": "Write it again with pyarrow.feather.write_feather.",
    "compressed": "Decompress it first; the buffers inside may be compressed instead.",
    "a Git LFS": "Fetch it with `git lfs pull`.",
}
_REWRITE = "Copy or write it again."

# What pyarrow raises for bytes that it cannot make sense of: its own errors, and those of Python
# for names that are no UTF-8 or lengths that fit no integer.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError)


class Format(Enum):
    """Which of the two IPC formats a file is in."""

    FILE = "file"
    STREAM = "stream"


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A mapped file. `schema` is all of its columns; `mapping` keeps `buffer` alive.

    `stream` is the part of `buffer` that is a stream: all of it, or what the footer follows.
    `expected` is the number of batches, where a footer tells it.
    """

    path: Path
    mapping: mmap.mmap
    buffer: pa.Buffer
    stream: pa.Buffer
    schema: pa.Schema
    expected: int | None

    @property
    def nbytes(self) -> int:
        return len(self.mapping)

    def holds(self, buffer: pa.Buffer) -> bool:
        """Say whether `buffer` is a part of the mapping, and no copy in memory."""
        begin = self.buffer.address
        return bool(begin <= buffer.address <= begin + self.nbytes)

    def check_size(self) -> None:
        """Raise DataError when the mapped file has since been cut short."""
        size = self.mapping.size()
        if size < self.nbytes:
            why = f"it was cut short while it was read: from {self.nbytes} bytes to {size}"
            hint = "Replace a file by renaming a new one over it; never write into it."
            raise DataError(READ, path=self.path, why=why, hint=hint)

    def batches(self, names: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches, in order, with those columns of `names` only.

        Other columns are neither loaded nor decoded. Buffers are views of the mapping, except those
        that are compressed, of the other byte order, or not aligned to their values' size: these
        are decoded into memory. Sizes of buffers are checked, values and offsets are not. Raises
        DataError where the file is damaged or ends too soon.
        """
        fields = [i for i, name in enumerate(self.schema.names) if name in names]
        options = pa.ipc.IpcReadOptions(
            included_fields=fields, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific
        )
        with _damage(self.path):
            source = pa.BufferReader(self.stream)
            reader = pa.ipc.open_stream(source, options=options)
            count = 0
            while (batch := _next(reader)) is not None:
                batch.validate()
                yield batch
                count += 1
            _check_end(self, source.tell(), count)
        advise(self.mapping, "MADV_NORMAL")


def open_shard(path: Path) -> Shard:
    """Map the Arrow IPC file at `path`, of either format, and read its schema.

    Raises DataError, which names the file and what it is, when it is missing, empty, cut short, of
    another kind, or cannot be opened.
    """
    with _damage(path):
        mapping = _map(path)
    buffer = pa.py_buffer(mapping)
    with _damage(path):
        stream, expected, footer = buffer, None, None
        if _format(path, buffer) is Format.FILE:
            stream = _stream_in_file(path, buffer)
            reader = pa.ipc.open_file(buffer)
            expected, footer = reader.num_record_batches, reader.schema
        schema = pa.ipc.open_stream(stream).schema
        if footer is not None and not footer.equals(schema):
            why = "its footer has another schema than its beginning"
            raise DataError(READ, path=path, why=why, hint=_REWRITE)
        # Names and types are decoded when they are asked for: here, where damage can be told.
        _ = schema.names, str(schema.types)
    return Shard(
        path=path, mapping=mapping, buffer=buffer, stream=stream, schema=schema, expected=expected
    )


def _map(path: Path) -> mmap.mmap:
    # O_NONBLOCK: opening a pipe nobody writes to would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(READ, path=path, why="it is no regular file")
        if not status.st_size:
            raise DataError(READ, path=path, why="the file is empty", hint=_REWRITE)
        mapping = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    advise(mapping, "MADV_RANDOM")
    return mapping


def advise(mapping: mmap.mmap, advice: str) -> None:
    """Tell the system how the mapping will be read, where Python knows this `advice`.

    Unless told MADV_RANDOM, the touch of a page that is not cached reads as far ahead as the disk
    is set to, often megabytes: all of a file, to get at the metadata of its batches.
    """
    if hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))


def _format(path: Path, buffer: pa.Buffer) -> Format:
    head = buffer[:_HEAD].to_pybytes()
    if head.startswith(_FILE_MAGIC):
        if buffer.size < _SMALLEST_FILE or buffer[-6:].to_pybytes() != _FILE_MAGIC:
            why = "it is cut short: an Arrow file ends with its footer, and this one does not"
            raise DataError(READ, path=path, why=why, hint=_REWRITE)
        return Format.FILE
    foreign = next((what for magic, what in _FOREIGN.items() if head.startswith(magic)), "")
    if not foreign and _begins_a_stream(head, buffer.size):
        return Format.STREAM
    if not foreign:
        foreign = "text (CSV?)" if _is_text(head) else f"something that begins with {head[:8]!r}"
    hint = next((hint for what, hint in _HINTS.items() if foreign.startswith(what)), "")
    why = f"this is no Arrow IPC file but {foreign}"
    raise DataError(READ, path=path, why=why, hint=hint)


def _begins_a_stream(head: bytes, size: int) -> bool:
    """Say whether `head` begins with a message's length, as now or as before Arrow 0.15."""
    prefix = 8 if head.startswith(_CONTINUATION) else 4
    length = int.from_bytes(head[prefix - 4 : prefix], "little", signed=True)
    return 0 < length <= size - prefix and (prefix == 8 or (length + prefix) % 8 == 0)


def _is_text(head: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in head)


def _stream_in_file(path: Path, buffer: pa.Buffer) -> pa.Buffer:
    """Return what lies between the magic, padded to 8 bytes, and the footer."""
    footer = int.from_bytes(buffer[-10:-6].to_pybytes(), "little", signed=True)
    size = buffer.size - 10 - footer - 8
    if footer < 0 or size < 0:
        why = f"its footer is damaged: {footer} bytes long in a file of {buffer.size}"
        raise DataError(READ, path=path, why=why, hint=_REWRITE)
    return buffer.slice(8, size)


def _next(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    try:
        return reader.read_next_batch()
    except StopIteration:
        return None


def _check_end(shard: Shard, end: int, count: int) -> None:
    """Check that the stream ended, after `count` batches, where and as it should.

    Without a footer a stream may lawfully stop after any batch, so that one that was cut just there
    cannot be told from one whose writer was not closed: this warns. What follows it is refused.
    """
    if shard.expected is not None:
        if count != shard.expected:
            why = f"it has {count} record batches where its footer says {shard.expected}"
            raise DataError(READ, path=shard.path, why=why, hint=_REWRITE)
        return
    if end < shard.nbytes:
        why = f"{shard.nbytes - end} bytes follow the end of the stream: are these two in one file?"
        raise DataError(READ, path=shard.path, why=why, hint="Give each stream a file of its own.")
    old = not shard.buffer[:4].equals(pa.py_buffer(_CONTINUATION))
    marker = bytes(4) if old else _END_OF_STREAM
    if shard.buffer[end - len(marker) : end].to_pybytes() != marker:
        text = (
            f"{shard.path} has no end-of-stream marker: its writer was not closed, or it was cut "
            "short just after a batch; what it has is read"
        )
        warnings.warn(text, stacklevel=2)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Raise what the system or pyarrow refuses in the block as a DataError that names `path`."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(READ, path=path, why=_why(error), hint=_hint(error)) from error


def _why(error: BaseException) -> str:
    # FileNotFoundError and the like are told by the system's words; Arrow's own I/O errors are
    # OSErrors without a number.
    if isinstance(error, OSError) and error.errno is not None:
        return reason(error)
    return f"the file is damaged or cut short ({str(error).splitlines()[0] if str(error) else '?'})"


def _hint(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        many = error.errno in (errno.EMFILE, errno.ENFILE)
        return "Each shard takes a descriptor: raise the limit with `ulimit -n`." if many else ""
    return _REWRITE
