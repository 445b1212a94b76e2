"""Growing files: sent by their new bytes, put together again at the other end.

A file's incarnation is a stream, and a stream's bytes are sent in order, each once, as `Append`
messages. The sender knows a file by its inode, so a rotated one is sent to its end before the new
one begins. The receiver keeps in its state how far the stream was read and how long the file then
was, and cuts off what a crash may have left beyond.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import IO

from protocol.logs import drop_redraws
from protocol.messages import Append
from protocol.publish import fsync_dir, make_dirs
from syncd.state import State

log = logging.getLogger("syncd")

READ_BYTES = 1024 * 1024
MARK_BYTES = 256
ROTATE_BYTES = 64 * 1024 * 1024


def is_log(path: str) -> bool:
    """Whether a growing file is the log of a stage, which goes on over runs and workers."""
    return path.endswith(".log") and path.count("/") == 1


def rotated(path: Path) -> Path:
    """The name under which the part before the newest is kept."""
    return path.with_name(path.name + ".1")


def rotate(path: Path, *, limit: int = ROTATE_BYTES) -> None:
    """Move a file of more than `limit` bytes out of the way; only the newest two parts are kept."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            os.replace(path, rotated(path))
            fsync_dir(path.parent)


class Tails:
    """The sending side. `root` is the shared folder; paths are relative to it."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root

    def collect(self, path: str, budget: int, *, terminal: bool) -> list[Append]:
        """Return what was appended to a file since the last call, `budget` raw bytes at most.

        With `terminal`, states of a line that were drawn over are left out. Moves the cursors: call
        it inside a transaction. A missing file gives nothing.
        """
        found: list[Append] = []
        known = self._known(path)
        with contextlib.ExitStack() as stack:
            for file in _open_parts(self._root / path, stack):
                there = os.fstat(file.fileno())
                stream, sent, mark = known.pop(there.st_ino, ("", -1, ""))
                if there.st_size == sent:
                    continue
                if not stream or not _is_same(file, there.st_size, sent, mark):
                    stream, sent = secrets.token_hex(8), 0
                if there.st_size > sent and budget > 0:
                    data = _read(file, sent, min(budget, READ_BYTES, there.st_size - sent))
                    blob = drop_redraws(data) if terminal else data
                    end = sent + len(data)
                    found.append(Append(path=path, stream=stream, start=sent, end=end, blob=blob))
                    sent, budget = end, budget - len(data)
                self._state.run(
                    "INSERT OR REPLACE INTO tails VALUES (?, ?, ?, ?, ?)",
                    path,
                    there.st_ino,
                    stream,
                    sent,
                    _mark(file, sent),
                )
                if sent < there.st_size:
                    return found  # the older part first, to its end
        for inode in known:
            self._state.run("DELETE FROM tails WHERE path = ? AND inode = ?", path, inode)
        return found

    def _known(self, path: str) -> dict[int, tuple[str, int, str]]:
        rows = self._state.rows("SELECT inode, stream, sent, mark FROM tails WHERE path = ?", path)
        return {int(i): (str(stream), int(sent), str(mark)) for i, stream, sent, mark in rows}

    def behind(self, path: str) -> int:
        """How many bytes of a file, and of its part before, were not collected yet."""
        known = self._known(path)
        total = 0
        for file in (rotated(self._root / path), self._root / path):
            try:
                found = file.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                sent = known[found.st_ino][1] if found.st_ino in known else 0
                total += found.st_size - (sent if found.st_size >= sent else 0)
        return total


def _open_parts(current: Path, stack: contextlib.ExitStack) -> list[IO[bytes]]:
    """Open a file and the part before it, older first, as they were at one moment."""
    while True:
        parts = [_open(path, stack) for path in (current, rotated(current))]
        again = _open(current, stack)
        if _inode(parts[0]) == _inode(again):  # else it was rotated meanwhile
            return [file for file in reversed(parts) if file is not None]


def _inode(file: IO[bytes] | None) -> int | None:
    return os.fstat(file.fileno()).st_ino if file else None


def _open(path: Path, stack: contextlib.ExitStack) -> IO[bytes] | None:
    """Open a regular file; None for what is none, which is never followed or waited for."""
    try:
        file = stack.enter_context(open(path, "rb", opener=_open_as_it_is))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return None
        raise
    return file if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _read(file: IO[bytes], start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _mark(file: IO[bytes], sent: int) -> str:
    """Return a digest of the first and the last of the bytes that were sent.

    A file that was emptied and written anew, and another one that was given the same inode, are
    told apart by it.
    """
    ends = _read(file, 0, min(sent, MARK_BYTES)), _read(file, max(sent - MARK_BYTES, 0), MARK_BYTES)
    last = ends[1][: min(sent, MARK_BYTES)]
    return hashlib.sha256(ends[0] + last).hexdigest()[:16]


def _is_same(file: IO[bytes], size: int, sent: int, mark: str) -> bool:
    return size >= sent and _mark(file, sent) == mark


class Joins:
    """The receiving side."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root

    def apply(self, message: Append) -> None:
        """Append a segment to its file, durably. Call it inside a transaction.

        What was read before is passed over. With a new stream a log goes on, on a line of its own,
        and any other file begins anew. Bytes that never came are noted in logs.
        """
        stream, read, length = self._row(message.path)
        fresh = stream != message.stream
        log_file = is_log(message.path)
        if fresh:
            read = 0
            if log_file:
                rotate(self._root / message.path)
            else:
                length = 0
        if message.end <= read:
            return
        data = message.blob
        if message.start < read and len(data) == message.end - message.start:
            data = data[read - message.start :]
        if message.start > read:
            missing = message.start - read
            log.warning("%d bytes of %s are missing", missing, message.path)
            if log_file:
                data = f"\n[syncd] {missing} bytes of this log are missing here\n".encode() + data
        there = self._append(message.path, data, length, own_line=fresh and log_file)
        self._state.run(
            "INSERT OR REPLACE INTO joins VALUES (?, ?, ?, ?)",
            message.path,
            message.stream,
            message.end,
            there,
        )

    def _row(self, path: str) -> tuple[str, int, int]:
        row = self._state.row("SELECT stream, read, length FROM joins WHERE path = ?", path)
        return (str(row[0]), int(row[1]), int(row[2])) if row else ("", 0, -1)

    def _append(self, path: str, data: bytes, length: int, *, own_line: bool) -> int:
        """Write `data` where the file of `length` bytes ends; return how long it then is."""
        target = self._root / path
        make_dirs(target.parent)
        new = not target.exists()
        fd = os.open(target, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            at = _end_of(file, data, length)
            if own_line and at > 0 and _read(file, at - 1, 1) != b"\n":
                data = b"\n" + data
            file.truncate(at)
            file.seek(at)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        if new:
            fsync_dir(target.parent)
        return at + len(data)


def _end_of(file: IO[bytes], data: bytes, length: int) -> int:
    """Return where a file ends that has `length` bytes on record, -1 for none.

    What lies beyond was written just before a crash. A shorter file is one that began anew, by
    the very bytes that come now if a crash came between, or one that someone cut.
    """
    there = os.fstat(file.fileno()).st_size
    if 0 <= length <= there:
        return length
    begun = _read(file, 0, min(there, len(data)))
    return 0 if begun and data.startswith(begun) else there
