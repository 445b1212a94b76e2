"""`trainer pool build`: an Arrow pool of real, labelled clips out of the package `aeon`.

The corpora are series of the UCR archive (Dau et al. 2019, "The UCR Time Series Archive",
IEEE/CAA J. Autom. Sinica 6(6)) that `aeon` carries as files; nothing is downloaded. Each series is
resampled to one length by linear interpolation and then z-normalised.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protocol.errors import DataError, UsageError
from protocol.publish import make_dirs, publishing, remove_leftovers
from trainer.files import writing
from trainer.hashing import file_sha256
from trainer.locks import locked
from trainer.pool.categories import Strings
from trainer.pool.format import Clips, pool_schema
from trainer.pool.manifest import (
    MAX_LENGTH,
    VERSION,
    Manifest,
    ShardEntry,
    content_hash,
    write_manifest,
)

Series = NDArray[np.float64]

CORPORA = (
    "ACSF1",
    "ArrowHead",
    "GunPoint",
    "ItalyPowerDemand",
    "OSULeaf",
    "PickupGestureWiimoteZ",
)
LENGTH = 128
SHARDS = 4
BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipTable:
    """Clips (n, T) with, for each, corpus, label, split and id, (n,)."""

    clips: Clips
    corpus: Strings
    label: Strings
    split: Strings
    clip_id: Strings

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, part: slice) -> ClipTable:
        return ClipTable(
            clips=self.clips[part],
            corpus=self.corpus[part],
            label=self.label[part],
            split=self.split[part],
            clip_id=self.clip_id[part],
        )


def build_pool(
    folder: Path,
    *,
    corpora: Sequence[str] = CORPORA,
    length: int = LENGTH,
    shards: int = SHARDS,
) -> Manifest:
    """Write the pool of the named corpora into `folder`, corpus after corpus.

    Raises UsageError when `aeon` is not installed or has no such corpus, or `length` or `shards`
    is out of range; DataError when a series cannot be used.
    """
    if not 2 <= length <= MAX_LENGTH:
        why = f"length is {length}; it must be from 2 to {MAX_LENGTH}"
        raise UsageError("build the pool", why=why)
    root, version = _aeon()
    tables, lengths = [], {}
    for name in sorted(set(corpora)):
        table, lengths[name] = _read_corpus(root, name, length)
        tables.append(table)
    preprocessing = {
        "source": f"aeon {version}",
        "resample": "linear",
        "normalise": "z",
        "length": length,
        "original_lengths": lengths,
    }
    return write_pool(folder, _joined(tables), shards=shards, preprocessing=preprocessing)


def _aeon() -> tuple[Path, str]:
    spec = importlib.util.find_spec("aeon")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "build the pool",
            why="the package aeon, which carries the corpora, is not installed",
            hint="pip install 'syncd[demo]'",
        )
    root = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    return root, importlib.metadata.version("aeon")


def _read_corpus(root: Path, name: str, length: int) -> tuple[ClipTable, list[int]]:
    from aeon.datasets import load_from_ts_file

    tables, lengths = [], set()
    for split in ("train", "test"):
        path = root / name / f"{name}_{split.upper()}.ts"
        if not path.is_file():
            raise UsageError(
                f"read the corpus {name!r}",
                why=f"aeon carries no {path.name}",
                hint=f"Known corpora: {', '.join(CORPORA)}.",
            )
        values, labels = load_from_ts_file(str(path))
        series = [_one_channel(value, path) for value in values]
        lengths |= {len(value) for value in series}
        clip_ids = [f"{name}-{split}-{number:04d}" for number in range(len(series))]
        tables.append(
            ClipTable(
                clips=np.stack([preprocess(value, length) for value in series]),
                corpus=np.full(len(series), name),
                label=np.asarray(labels, dtype=np.str_),
                split=np.full(len(series), split),
                clip_id=np.array(clip_ids),
            )
        )
    return _joined(tables), [min(lengths), max(lengths)]


def _one_channel(value: Any, path: Path) -> Series:
    series = np.asarray(value, dtype=np.float64)
    if series.ndim != 2 or series.shape[0] != 1:
        raise DataError("read a corpus", path=path, why="its series have several channels")
    if series.shape[1] < 2 or not np.isfinite(series).all():
        raise DataError("read a corpus", path=path, why="a series is empty or has gaps")
    channel: Series = series[0]
    return channel


def preprocess(series: Series, length: int) -> Clips:
    """Return a series (m,) as a clip (length,) float32: resampled linearly, then z-normalised.

    A constant series becomes zeros.
    """
    at = np.linspace(0.0, len(series) - 1.0, length)
    resampled = np.interp(at, np.arange(len(series)), series)
    centred = resampled - resampled.mean()
    spread = centred.std()
    return (centred / spread if spread > 1e-8 else np.zeros(length)).astype(np.float32)


def _joined(tables: Iterable[ClipTable]) -> ClipTable:
    parts = list(tables)
    return ClipTable(
        clips=np.concatenate([part.clips for part in parts]),
        corpus=np.concatenate([part.corpus for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        split=np.concatenate([part.split for part in parts]),
        clip_id=np.concatenate([part.clip_id for part in parts]),
    )


def write_pool(
    folder: Path, table: ClipTable, *, shards: int, preprocessing: Mapping[str, Any]
) -> Manifest:
    """Write a pool: the shards first, each atomically, then `pool.json`, then remove old shards.

    Raises UsageError when there are fewer clips than shards, or two clips have one id, BusyError
    when another process writes there, DataError when the folder cannot be written.
    """
    if not 1 <= shards <= len(table):
        why = f"shards is {shards}; it must be from 1 to the number of clips, {len(table)}"
        raise UsageError("write the pool", path=folder, why=why)
    if len(np.unique(table.clip_id)) != len(table):
        raise UsageError("write the pool", path=folder, why="two clips have one id")
    with writing("write the pool", folder):
        make_dirs(folder)
        with locked(folder / ".lock", timeout=0.0):
            return _write(folder, table, shards=shards, preprocessing=preprocessing)


def _write(
    folder: Path, table: ClipTable, *, shards: int, preprocessing: Mapping[str, Any]
) -> Manifest:
    remove_leftovers(folder)
    bounds = np.linspace(0, len(table), shards + 1).round().astype(int).tolist()
    corpora, counts = np.unique(table.corpus, return_counts=True)
    entries = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        path = folder / f"pool-{number:05d}-of-{shards:05d}.arrow"
        _write_shard(path, table[start:stop], corpora.tolist())
        entries.append(
            ShardEntry(
                name=path.name,
                rows=stop - start,
                size=path.stat().st_size,
                sha256=file_sha256(path),
            )
        )
    manifest = Manifest(
        version=VERSION,
        length=table.clips.shape[1],
        rows=len(table),
        content_hash=content_hash(_identities(table), table.clips),
        shards=tuple(entries),
        corpora=dict(zip(corpora.tolist(), counts.tolist(), strict=True)),
        preprocessing=preprocessing,
    )
    write_manifest(folder, manifest)
    kept = {entry.name for entry in entries}
    for old in folder.glob("pool-*-of-*.arrow"):
        if old.name not in kept:
            old.unlink()
    return manifest


def _identities(table: ClipTable) -> Iterable[tuple[str, str, str, str]]:
    columns = (table.clip_id, table.corpus, table.label, table.split)
    return zip(*(column.tolist() for column in columns), strict=True)


def _write_shard(path: Path, table: ClipTable, corpora: Sequence[str]) -> None:
    schema = pool_schema(table.clips.shape[1])
    values = pa.array(table.clips.reshape(-1), type=pa.float32())
    codes = pa.array(np.searchsorted(corpora, table.corpus), type=pa.int32())
    batch = pa.record_batch(
        [
            pa.FixedSizeListArray.from_arrays(values, table.clips.shape[1]),
            # An IPC file holds one dictionary a column, so every batch has that of the pool.
            pa.DictionaryArray.from_arrays(codes, pa.array(corpora, type=pa.string())),
            pa.array(table.label.tolist(), type=pa.string()),
            pa.array(table.split.tolist(), type=pa.string()),
            pa.array(table.clip_id.tolist(), type=pa.string()),
        ],
        schema=schema,
    )
    with publishing(path) as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(table), BATCH_ROWS):
            writer.write_batch(batch.slice(start, BATCH_ROWS))
