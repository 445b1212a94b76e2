"""Which files a path means: a file, a folder of shards, or what `datasets` wrote to disk.

A folder with `state.json` is one that `Dataset.save_to_disk` wrote: its `_data_files` are the
shards, in that order. Releases of `datasets` such as 1.4 kept a shuffled or filtered dataset as it
was, beside an Arrow file of row numbers that `_indices_data_files` names; 2.7 and later write the
rows out in order. Formats and columns set in the library (`_format_*`) are not heeded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError, UsageError
from trainer.files import reason
from trainer.loader.arrow import READ

SUFFIXES = (".arrow", ".arrows", ".feather")
STATE = "state.json"
SPLITS = "dataset_dict.json"
_SHARDS = "_data_files"
_INDICES = ("_indices_data_files", "_indices_files")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """`shards` in the order of their rows; `indices`: which of their rows to use, if not all."""

    shards: tuple[Path, ...]
    indices: tuple[Path, ...] = ()


def find_shards(paths: Paths) -> Found:
    """Return the Arrow files that `paths` means: files, folders, or one saved dataset.

    Raises UsageError when there is no path or a saved dataset with indices is one of several,
    DataError when a folder has no shards, or is a saved dataset that cannot be read or has splits.
    """
    if isinstance(paths, str | os.PathLike):
        return _find(Path(paths))
    found = [_find(Path(path)) for path in paths]
    if not found:
        raise UsageError(READ, why="no path is given")
    if len(found) == 1:
        return found[0]
    if any(each.indices for each in found):
        why = "a saved dataset with an indices file cannot be one of several paths"
        hint = "Save it again with a recent `datasets`, which writes the rows out in order."
        raise UsageError(READ, why=why, hint=hint)
    return Found(shards=tuple(shard for each in found for shard in each.shards))


def _find(path: Path) -> Found:
    if not path.is_dir():
        return Found(shards=(path,))
    if (path / STATE).is_file():
        return _saved_dataset(path)
    if (path / SPLITS).is_file():
        raise _has_splits(path)
    files = sorted(each for each in path.iterdir() if each.is_file())
    shards = tuple(each for each in files if each.suffix in SUFFIXES)
    if not shards:
        kinds = Counter(each.suffix or each.name for each in files)
        there = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)) or "no files"
        why = f"the folder has no {', '.join(SUFFIXES)} (it has {there})"
        raise DataError(READ, path=path, why=why, hint="Name the files, or another folder.")
    return Found(shards=shards)


def _saved_dataset(folder: Path) -> Found:
    state = _read_json(folder / STATE)
    shards = _names(folder, state, _SHARDS)
    if not shards:
        raise DataError(READ, path=folder / STATE, why=f"it names no {_SHARDS}")
    indices = next((names for key in _INDICES if (names := _names(folder, state, key))), ())
    return Found(shards=shards, indices=indices)


def _names(folder: Path, state: dict[str, object], key: str) -> tuple[Path, ...]:
    """Return the files that `state` lists under `key`: [{"filename": "..."}, ...], or null."""
    listed = state.get(key) or []
    try:
        return tuple(folder / entry["filename"] for entry in listed)  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        why = f"{key} is not a list of file names"
        raise DataError(READ, path=folder / STATE, why=why) from error


def _has_splits(folder: Path) -> DataError:
    splits = _read_json(folder / SPLITS).get("splits")
    names = [str(folder / str(each)) for each in splits] if isinstance(splits, list) else []
    hint = f"Name one of them: {', '.join(names)}." if names else ""
    return DataError(READ, path=folder, why="this is a DatasetDict, which has splits", hint=hint)


def _read_json(path: Path) -> dict[str, object]:
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(READ, path=path, why=reason(error)) from error
    if not isinstance(read, dict):
        raise DataError(READ, path=path, why="it is no JSON object")
    return read
