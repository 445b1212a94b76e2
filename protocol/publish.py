"""Atomic publishing: a reader sees the old file or the new one, also after a power cut.

The order is always: write a temporary file beside the target, fsync it, rename it over the
target, fsync the folder. Data is published before what refers to it.

Temporary names start with `.` and end with `.tmp`; `remove_leftovers` clears what a crash left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def temporary_beside(path: Path) -> Path:
    """Return an unused name for a temporary file in the folder of `path`."""
    # The name is cut so that the decorated one stays under 255 bytes.
    stem = path.name.encode()[:200].decode(errors="ignore")
    return path.with_name(f".{stem}.{secrets.token_hex(6)}.tmp")


def fsync_dir(path: Path) -> None:
    """Make the entries of a folder durable; nothing on systems that cannot open folders."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path, *, mode: int = 0o755) -> None:
    """Create a folder and its missing parents, each durable in its parent."""
    missing: list[Path] = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=mode)
        fsync_dir(folder.parent)


def rename_durable(source: Path, target: Path) -> None:
    """Rename a file whose content is already durable over `target`, durably."""
    os.replace(source, target)
    fsync_dir(target.parent)


@contextlib.contextmanager
def publishing(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a binary file that becomes `path` when the block ends; no trace stays if it raises."""
    temporary = temporary_beside(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
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
    (the disk is full), the file is as long as it was.
    """
    new = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), mode)
    try:
        length = os.fstat(fd).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, length)
            raise
    finally:
        os.close(fd)
    if new:
        fsync_dir(path.parent)


def drop_torn_line(path: Path) -> bytes:
    """Cut an unfinished last line off an append-only file of lines; return what was cut.

    A crash in the middle of `append_durable` leaves such a line. Nothing is done when the file is
    missing, empty or whole.
    """
    try:
        file = open(path, "r+b")
    except FileNotFoundError:
        return b""
    with file:
        size = file.seek(0, os.SEEK_END)
        tail = b""
        at = size
        while at > 0 and b"\n" not in tail:
            step = min(64 * 1024, at)
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
        torn = tail[tail.rfind(b"\n") + 1 :]
        if torn:
            file.truncate(size - len(torn))
            file.flush()
            os.fsync(file.fileno())
        return torn


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files that a crashed publisher left in `folder`; return how many."""
    count = 0
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(".tmp") and entry.is_file():
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                count += 1
    return count
