"""Reading a pool: Arrow IPC shards, memory-mapped, checked when they are first touched.

A shard is an Arrow IPC *file*, uncompressed, so that its buffers are the mapped file itself:
a clip is read without a copy of anything but the clip. `Table.take` is not used: on a chunked
table it joins all chunks first (apache/arrow#39565).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protocol.errors import DataError, UsageError
from trainer.hashing import file_sha256
from trainer.pool.categories import Categories, Codes, Texts
from trainer.pool.manifest import (
    MANIFEST,
    REBUILD,
    Manifest,
    ShardEntry,
    content_hash,
    read_manifest,
)
from trainer.randomness import Words, sample_keys

Clips = NDArray[np.float32]
Rows = NDArray[np.int64]

ARROW_MAGIC = b"ARROW1"
PARQUET_MAGIC = b"PAR1"
SPLITS = frozenset({"train", "test"})


def pool_schema(length: int) -> pa.Schema:
    """Return the Arrow schema of a shard of clips of `length` values."""
    return pa.schema(
        [
            pa.field("clip", pa.list_(pa.float32(), length), nullable=False),
            pa.field("corpus", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            pa.field("label", pa.string(), nullable=False),
            pa.field("split", pa.string(), nullable=False),
            pa.field("clip_id", pa.string(), nullable=False),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A record batch: its first row in the pool, and its clips (n, T) as a view of the file."""

    start: int
    clips: Clips
    batch: pa.RecordBatch


class Pool:
    """A pool on disk. Columns and chunks are read when first asked for, and then kept."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @property
    def rows(self) -> int:
        return self.manifest.rows

    @property
    def length(self) -> int:
        """T, the number of values in a clip."""
        return self.manifest.length

    @property
    def content_hash(self) -> str:
        return self.manifest.content_hash

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        start = 0
        for entry in self.manifest.shards:
            path = self.folder / entry.name
            for batch in _read_shard(path, entry, self.length):
                chunks.append(_Chunk(start=start, clips=_clip_view(batch, path), batch=batch))
                start += batch.num_rows
        self._check_corpora(chunks)
        return chunks

    def _check_corpora(self, chunks: Sequence[_Chunk]) -> None:
        counts: Counter[str] = Counter()
        for chunk in chunks:
            for each in chunk.batch.column("corpus").value_counts().to_pylist():
                counts[each["values"]] += each["counts"]
        if counts != self.manifest.corpora:
            raise _damaged(self.folder / MANIFEST, "its corpora are not those of the shards")

    @cached_property
    def _starts(self) -> Rows:
        return np.array([chunk.start for chunk in self._chunks], dtype=np.int64)

    def clips(self, rows: Rows) -> Clips:
        """Return the clips of `rows` (n,) as float32 (n, T), copied once out of the mapped file.

        Raises UsageError when a row is not in the pool, DataError when a shard is damaged.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.rows):
            raise UsageError("read clips", why=f"a row is not between 0 and {self.rows - 1}")
        out = np.empty((len(rows), self.length), dtype=np.float32)
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        for owner in np.unique(owners):
            chunk, mine = self._chunks[owner], owners == owner
            out[mine] = chunk.clips[rows[mine] - chunk.start]
        return out

    def _arrays(self, name: str) -> list[pa.Array]:
        return [chunk.batch.column(name) for chunk in self._chunks]

    @cached_property
    def corpus(self) -> Categories:
        """The corpus of each row, (rows,)."""
        return Categories.of(self._arrays("corpus"))

    @cached_property
    def label(self) -> Categories:
        """The label of each row within its corpus, (rows,)."""
        return Categories.of(self._arrays("label"))

    @cached_property
    def split(self) -> Categories:
        """ "train" or "test" for each row, (rows,), as the corpus' authors split it."""
        return Categories.of(self._arrays("split"))

    @cached_property
    def clip_id(self) -> Texts:
        """The stable, unique id of each row, (rows,)."""
        return Texts(self._arrays("clip_id"))

    @cached_property
    def keys(self) -> Words:
        """The 64-bit key of each row's id, (rows,): what randomness is keyed by."""
        return np.concatenate([sample_keys(ids) for ids in self.clip_id.chunks()])

    @cached_property
    def row_classes(self) -> Categories:
        """The class of each row, (rows,): `corpus/label`."""
        return self.corpus.joined(self.label, "/")

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes, sorted."""
        return self.row_classes.names

    @property
    def class_ids(self) -> Codes:
        """For each row the place of its class in `classes`, (rows,), as small integers."""
        return self.row_classes.codes

    def check_content(self) -> None:
        """Hash every row again. Raises DataError when the rows are not those of the manifest."""
        columns = (self.clip_id, self.corpus, self.label, self.split)
        rows = zip(*(column[:].tolist() for column in columns), strict=True)
        if content_hash(rows, self.clips(np.arange(self.rows))) != self.content_hash:
            raise _damaged(self.folder / MANIFEST, "its content hash is not that of the rows")


def open_pool(path: Path) -> Pool:
    """Open the pool in the folder `path` (or of the `pool.json` given).

    Sizes are checked at once, each shard's SHA-256 and schema when its rows are first read. Raises
    DataError naming the file when a shard is missing, cut short, altered, or not such an Arrow
    file.
    """
    if path.is_file() and path.name != MANIFEST:
        raise _damaged(path, _why_not_arrow(path) or f"a pool is a folder with a {MANIFEST}")
    folder = path.parent if path.name == MANIFEST else path
    manifest = read_manifest(folder)
    for entry in manifest.shards:
        _check_size(folder / entry.name, entry)
    return Pool(folder, manifest)


def _damaged(path: Path, why: str) -> DataError:
    return DataError("read the pool", path=path, why=why, hint=REBUILD)


def _check_size(path: Path, entry: ShardEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _damaged(path, f"a shard is missing: {error.strerror}") from error
    if not path.is_file():
        raise _damaged(path, "a shard is missing: this is no file")
    if size != entry.size:
        cut = "cut short" if size < entry.size else "altered"
        reason = _why_not_arrow(path) or f"{cut}: {size} bytes instead of {entry.size}"
        raise _damaged(path, reason)


def _why_not_arrow(path: Path) -> str:
    """Return why the file cannot be an Arrow IPC file, or "" when it begins like one."""
    with open(path, "rb") as file:
        head = file.read(len(ARROW_MAGIC))
    if head.startswith(PARQUET_MAGIC):
        return "a Parquet file; a pool's shards are Arrow IPC files"
    return "" if head == ARROW_MAGIC else "not an Arrow IPC file"


def _read_shard(path: Path, entry: ShardEntry, length: int) -> list[pa.RecordBatch]:
    _check_size(path, entry)
    if file_sha256(path) != entry.sha256:
        raise _damaged(path, _why_not_arrow(path) or "its SHA-256 is not that of the manifest")
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, _why_not_arrow(path) or str(error)) from error
    if not reader.schema.equals(pool_schema(length), check_metadata=False):
        raise _damaged(path, f"its columns are {_columns(reader.schema)}")
    if sum(batch.num_rows for batch in batches) != entry.rows:
        raise _damaged(path, f"it does not hold {entry.rows} rows")
    splits = {split for batch in batches for split in batch.column("split").unique().to_pylist()}
    if not splits <= SPLITS:
        raise _damaged(path, f"its splits are {sorted(map(str, splits))}, not train and test")
    return batches


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _clip_view(batch: pa.RecordBatch, path: Path) -> Clips:
    column = batch.column("clip")
    if column.null_count or column.flatten().null_count:
        raise _damaged(path, "the column clip holds nulls")
    # flatten() heeds the array's offset, which `.values` does not.
    values: Clips = column.flatten().to_numpy(zero_copy_only=True)
    clips = values.reshape(batch.num_rows, -1)
    finite = np.isfinite(clips).all(axis=1)
    if not finite.all():
        clip_id = batch.column("clip_id")[int(finite.argmin())].as_py()
        raise _damaged(path, f"the clip {clip_id} has values that are not finite")
    return clips
