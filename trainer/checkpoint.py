"""Checkpoints: published atomically, checked before they are believed.

    checkpoint-00000130.pt      the state, as torch.save writes it
    checkpoint-00000130.json    {"version", "step", "size", "sha256", "score"}, published after it

A checkpoint without its manifest does not exist; one whose bytes are not those of the manifest
is passed over, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from protocol.errors import DataError
from protocol.publish import fsync_dir, publish_json, publishing, remove_leftovers
from protocol.schema import decode
from trainer.console import warn
from trainer.files import writing
from trainer.hashing import file_sha256

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What stands beside a checkpoint. `score` ranks it, higher is better; None when unknown."""

    step: int
    size: int
    sha256: str
    version: int = VERSION
    score: float | None = None


class _HashingWriter:
    """A file to write to that knows the SHA-256 and the size of what was written.

    `refused` is why the system did not take what was written: torch drops it for an error of its
    own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.refused: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.refused = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save(
    directory: Path, step: int, state: Mapping[str, Any], *, score: float | None = None
) -> Path:
    """Publish `state` as the checkpoint of `step`, durably; return the path of its data.

    Raises DataError when it cannot be written; earlier checkpoints stay as they are.
    """
    path = _data_path(directory, step)
    with writing("write the checkpoint", path):
        with publishing(path) as file:
            writer = _HashingWriter(file)
            try:
                torch.save(dict(state), cast(IO[bytes], writer))
            except RuntimeError:
                if writer.refused is not None:
                    raise writer.refused from None
                raise
        manifest = CheckpointManifest(
            step=step, size=writer.size, sha256=writer.digest.hexdigest(), score=score
        )
        publish_json(path.with_suffix(".json"), asdict(manifest))
    return path


def newest_valid(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint whose bytes are whole, and its state; None without one.

    What is cut short, altered or unreadable is passed over with a warning on stderr. Only
    tensors and plain values are unpickled (`weights_only`).
    """
    for manifest_path in sorted(directory.glob("checkpoint-*.json"), reverse=True):
        path = manifest_path.with_suffix(".pt")
        try:
            return path, _load(path, read_manifest(manifest_path))
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            warn(f"passed over the checkpoint {path}: {error}")
    return None


def read_manifest(path: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest. Raises OSError, or ValueError when it is malformed."""
    manifest = decode(CheckpointManifest, json.loads(path.read_bytes()))
    if manifest.version != VERSION:
        raise ValueError(f"version {manifest.version}; this program reads {VERSION}")
    return manifest


def _load(path: Path, manifest: CheckpointManifest) -> dict[str, Any]:
    size = path.stat().st_size
    if size != manifest.size:
        raise ValueError(f"{size} bytes instead of {manifest.size}: it was cut short")
    if file_sha256(path) != manifest.sha256:
        raise ValueError("its SHA-256 is not that of its manifest")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError("it holds no state")
    return state


def prune(directory: Path, *, keep_last: int = 2, keep_best: int = 1) -> list[Path]:
    """Remove all but the newest `keep_last` and the `keep_best` of highest score; return which."""
    manifests: dict[Path, CheckpointManifest] = {}
    for path in sorted(directory.glob("checkpoint-*.json")):
        try:
            manifests[path] = read_manifest(path)
        except (OSError, ValueError) as error:
            warn(f"left alone what is no checkpoint manifest: {path}: {error}")
    newest = sorted(manifests, reverse=True)[:keep_last]
    scored = [path for path, manifest in manifests.items() if manifest.score is not None]
    best = sorted(scored, key=lambda path: manifests[path].score or 0.0, reverse=True)[:keep_best]
    doomed = [path for path in manifests if path not in {*newest, *best}]
    for path in doomed:
        path.unlink()
    # The manifests go first, durably: data without a manifest is no checkpoint.
    fsync_dir(directory)
    for path in directory.glob("checkpoint-*.pt"):
        if not path.with_suffix(".json").exists():
            path.unlink()
    remove_leftovers(directory)
    return [path.with_suffix(".pt") for path in doomed]


def check_config(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, path: Path, ignore: Iterable[str] = ()
) -> None:
    """Raise DataError listing the fields in which a checkpoint's configuration is another.

    `ignore` names fields that a resumed run may change, such as the thread count.
    """
    names = sorted((set(saved) | set(current)) - set(ignore))
    differing = [
        f"{name} was {saved.get(name)!r}, is {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise DataError(
            "resume from the checkpoint",
            path=path,
            why="; ".join(differing),
            hint="Resume with the configuration it was made with, or start a new run.",
        )


def _data_path(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step:08d}.pt"
