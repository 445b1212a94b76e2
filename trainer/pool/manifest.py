"""`pool.json`: what a pool consists of, written last and read first.

    {"version": 1, "length": 128, "rows": 2249, "content_hash": "...",
     "shards": [{"name": "pool-00000-of-00004.arrow", "rows": 563, "size": ..., "sha256": "..."}],
     "corpora": {"ArrowHead": 211, ...}, "preprocessing": {...}}

The content hash covers the rows in order (clip id, corpus, label, split, clip) but not how they
are cut into shards; it names the pool in index files, reports and bundles.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataError
from protocol.names import safe_relative
from protocol.publish import publish_json
from trainer.files import read_record, writing

VERSION = 1
MAX_LENGTH = 2**16
MANIFEST = "pool.json"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
REBUILD = "Build the pool again with `trainer pool build`, or fetch it again."


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One Arrow file of the pool: name, rows, size in bytes, SHA-256."""

    name: str
    rows: int
    size: int
    sha256: str

    def __post_init__(self) -> None:
        safe_relative(self.name)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `pool.json`. `length` is T, the values in a clip."""

    version: int
    length: int
    rows: int
    content_hash: str
    shards: tuple[ShardEntry, ...]
    corpora: Mapping[str, int]
    preprocessing: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}; this program reads {VERSION}")
        if not 1 <= self.length <= MAX_LENGTH or self.rows < 1:
            raise ValueError(f"length must be from 1 to {MAX_LENGTH}, and rows at least 1")
        if not _SHA256.match(self.content_hash):
            raise ValueError("content_hash is no SHA-256")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard stands there twice")
        if sum(shard.rows for shard in self.shards) != self.rows:
            raise ValueError(f"the shards' rows do not add up to {self.rows}")
        if sum(self.corpora.values()) != self.rows:
            raise ValueError(f"the corpora's rows do not add up to {self.rows}")


def read_manifest(folder: Path) -> Manifest:
    """Read `pool.json` of the pool in `folder`.

    Raises DataError when it is missing, not JSON, malformed or of another version.
    """
    path, what = folder / MANIFEST, "open the pool"
    manifest = read_record(Manifest, path, what=what, hint=REBUILD)
    if manifest is None:
        why = "no such file" if folder.is_dir() else "no such folder"
        raise DataError(what, path=path, why=why, hint=REBUILD)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish `pool.json`, once its shards are durable."""
    with writing("write the pool", folder / MANIFEST):
        publish_json(folder / MANIFEST, asdict(manifest))


def content_hash(rows: Iterable[tuple[str, str, str, str]], clips: NDArray[np.float32]) -> str:
    """Return the pool's content hash.

    `rows` are (clip id, corpus, label, split) in the pool's order, `clips` (n, T) their values,
    hashed as little-endian float32.
    """
    digest = hashlib.sha256()
    for row, clip in zip(rows, clips.astype("<f4", copy=False), strict=True):
        digest.update(json.dumps(row).encode())
        digest.update(clip.tobytes())
    return digest.hexdigest()
