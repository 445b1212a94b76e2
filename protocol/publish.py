"""Atomic publishing: a reader sees the old file or the new one, also after a power cut.

The order is always: write a temporary file beside the target, fsync it, rename it over the
target, fsync the folder. Data is published before what refers to it.

Temporary names start with `.` and end with `.tmp`; `remove_leftovers` clears what a crash left.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from protocol.files import BINARY

_WINDOWS = os.name == "nt"
# There a rename over a file fails while another program has it open, as scanners do for a moment.
_RENAME_PAUSES = (0.01, 0.05, 0.2, 0.7)
_RANDOM_BYTES = 6
_SUFFIX = ".tmp"


def temporary_beside(path: Path) -> Path:
    """Return an unused name for a temporary file in the folder of `path`."""
    return path.with_name(f".{_stem(path.name)}.{os.urandom(_RANDOM_BYTES).hex()}{_SUFFIX}")


def _stem(name: str) -> str:
    # Cut so that the decorated name stays under 255 bytes.
    return name.encode()[:200].decode(errors="ignore")


def fsync_dir(path: Path) -> None:
    """Make the entries of a folder durable; nothing on systems that cannot open folders."""
    if _WINDOWS:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durable(path: Path) -> None:
    """Make a file that was found durable, its entry in its folder too. Raises OSError.

    That a file can be read says nothing of that: whoever wrote it may have been killed before.
    """
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
    fsync_dir(path.parent)


def make_dirs(path: Path, *, mode: int = 0o755) -> None:
    """Create a folder and its missing parents, each durable in its parent.

    A process that was killed here may have left one folder that is not durable yet, the deepest
    that is there; so that one is made durable too.
    """
    missing: list[Path] = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    with contextlib.suppress(PermissionError):  # then it is not of our making
        fsync_dir(at.parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=mode)
        fsync_dir(folder.parent)


def rename_durable(source: Path, target: Path) -> None:
    """Rename a file whose content is already durable over `target`, durably."""
    _replace(source, target)
    fsync_dir(target.parent)


def _replace(source: Path, target: Path) -> None:
    for pause in _RENAME_PAUSES if _WINDOWS else ():
        try:
            os.replace(source, target)
        except PermissionError:
            time.sleep(pause)
        else:
            return
    os.replace(source, target)


@contextlib.contextmanager
def publishing(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a binary file that becomes `path` when the block ends; no trace stays if it raises."""
    temporary = temporary_beside(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename_durable(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def publish_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`, atomically and durably. Raises OSError."""
    with publishing(path, mode=mode) as file:
        file.write(data)


def publish_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace `path` by `value` as indented JSON. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    publish_bytes(path, text.encode("utf-8"), mode=mode)


def append_durable(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Append `data` to `path` and make it durable, the file's entry in its folder too.

    Of several writers of one file none may call this while another does. When it raises OSError
    (the disk is full), the file is as long as it was. After a power cut what was being appended
    may be there in part, with zeros for the rest.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, mode)
    try:
        length = os.fstat(fd).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            # Also when the file was there: its maker may have been killed before this.
            fsync_dir(path.parent)
        except OSError:
            os.ftruncate(fd, length)
            raise
    finally:
        os.close(fd)


def remove_leftovers(folder: Path, *, of: str = "") -> int:
    """Remove temporary files that a crashed publisher left in `folder`.

    Only those on their way to the name `of`, if it is given. Returns how many; a folder that is
    missing has none.
    """
    count = 0
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return 0
    for entry in entries:
        if _is_temporary(entry.name, of) and not entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                count += 1
    return count


def _is_temporary(name: str, target: str) -> bool:
    """Whether a name is one of `temporary_beside`, for this target or, if it is "", for any."""
    if not (name.startswith(".") and name.endswith(_SUFFIX)):
        return False
    return not target or name[: -(2 * _RANDOM_BYTES + len(_SUFFIX))] == f".{_stem(target)}."
