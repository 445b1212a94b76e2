"""SHA-256 of files, of trees of files, and of the program itself."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import protocol
import trainer


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hex digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_sha256(root: Path, files: Iterable[Path]) -> str:
    """Return one SHA-256 over `files` below `root`: their relative paths and their bytes.

    The order in which the files are given does not matter.
    """
    entries = sorted((path.relative_to(root).as_posix(), path) for path in files)
    digest = hashlib.sha256()
    for name, path in entries:
        digest.update(f"{file_sha256(path)}  {name}\n".encode())
    return digest.hexdigest()


@functools.cache
def code_hash() -> str:
    """Return the SHA-256 of the source that computes results: `trainer` and `protocol`."""
    digest = hashlib.sha256()
    for package in (protocol, trainer):
        root = Path(package.__path__[0])
        digest.update(f"{package.__name__} {tree_sha256(root, root.rglob('*.py'))}\n".encode())
    return digest.hexdigest()
