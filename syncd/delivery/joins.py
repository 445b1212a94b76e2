"""Growing files, put together again at the controller from the segments that arrive.

The state keeps how far each stream was read and how long its file then was; what a crash has left
beyond that is cut off. `syncd.delivery.streams` is the sending side.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from protocol.errors import RefusedError
from protocol.files import BINARY, NO_FOLLOW
from protocol.messages import Append
from protocol.publish import fsync_dir, make_dirs, publish_bytes, remove_leftovers
from syncd.delivery.files import inside
from syncd.delivery.parked import Parked
from syncd.log_parts import is_log, rotate, rotated
from syncd.state import State

log = logging.getLogger("syncd")


class Joins:
    """The receiving side. `root` is the shared folder."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root
        self._parked = Parked(state)
        self.problems: dict[str, str] = {}

    def apply(self, message: Append) -> None:
        """Append a segment to its file, durably. Call it inside a transaction.

        What was read before is passed over. With a new stream a log goes on, on a line of its own,
        and any other file begins anew. Bytes that never came are noted in logs.

        What cannot be written now waits for `retry`, and its file is named in `problems`. Raises
        OSError when the disk is full, since then nothing else could be kept either, and
        RefusedError for what stands in the way for good.
        """
        if self._parked.size(message.path):
            self._parked.add(message)  # in its turn
            return
        try:
            self._join(message)
        except OSError as error:
            self._park(message, error)

    def retry(self) -> None:
        """Write what could not be written before, as far as it can be now."""
        for path in self._parked.paths():
            with self._state.transaction():
                while (message := self._parked.next(path)) is not None:
                    try:
                        self._join(message)
                    except RefusedError as error:
                        self.problems[path] = str(error)
                    except OSError as error:
                        self._note(path, error)
                        break
                    self._parked.drop_next(path)
                else:
                    self.problems.pop(path, None)

    def _park(self, message: Append, error: OSError) -> None:
        if error.errno in _FULL:
            raise error
        self._parked.add(message)
        self._note(message.path, error)

    def _note(self, path: str, error: OSError) -> None:
        why = f"cannot be written: {error.strerror or error}"
        if not self.problems.get(path, "").startswith(why):
            log.warning("%s: %s", path, why)
        self.problems[path] = f"{why}; {self._parked.size(path)} bytes of it wait"

    def _join(self, message: Append) -> None:
        stream, read, length = self._row(message.path)
        fresh = stream != message.stream
        log_file = is_log(message.path)
        if fresh:
            read = 0
        if message.end <= read:
            return
        if log_file:
            length = self._rotated(message.path, length)
        elif fresh:
            length = 0
        data = message.blob
        if message.start < read and len(data) == message.end - message.start:
            data = data[read - message.start :]
        if message.start > read:
            missing = message.start - read
            log.warning("%d bytes of %s are missing", missing, message.path)
            if log_file:
                data = f"\n[syncd] {missing} bytes of this log are missing here\n".encode() + data
        there = self._append(message.path, data, length, fresh=fresh)
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

    def _rotated(self, path: str, length: int) -> int:
        """Begin a new part of a log if it is long; return how long its newest part is on record.

        A crash may have left bytes beyond those on record, or the new part when the record is
        still of the one before.
        """
        target = inside(self._root, path)
        there, before = _size(target), _size(rotated(target))
        if 0 <= there < length == before:
            return 0
        if 0 <= length < there:
            with _opened(target, path) as file:
                file.truncate(length)
                os.fsync(file.fileno())
        with _refusing(path):
            rotate(target)
        return length if os.path.lexists(target) else 0

    def _append(self, path: str, data: bytes, length: int, *, fresh: bool) -> int:
        """Write `data` where the file of `length` bytes ends; return how long it then is."""
        target = inside(self._root, path)
        if not os.path.lexists(target):
            # Whole or not there: the state does not know its length yet, so nothing would tell
            # what a power cut has torn from what is to stay.
            with _refusing(path):
                make_dirs(target.parent)
                remove_leftovers(target.parent, of=target.name)  # of one that was killed here
                publish_bytes(target, data)
            return len(data)
        with _opened(target, path) as file:
            at = _end_of(file, data, length)
            if fresh and is_log(path) and at > 0 and _read(file, at - 1, 1) != b"\n":
                data = b"\n" + data
            file.truncate(at)
            file.seek(at)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        if at == 0:  # who made the file may have been killed before this
            fsync_dir(target.parent)
        return at + len(data)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _size(path: Path) -> int:
    """Return the size of a file, -1 for what is none."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _opened(target: Path, path: str) -> IO[bytes]:
    """Open a file to be joined. Raises RefusedError for what is no file."""
    flags = os.O_RDWR | BINARY | NO_FOLLOW
    with _refusing(path):
        file = os.fdopen(os.open(target, flags), "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RefusedError(f"append to {path!r}", why="it is no regular file")
    return file


@contextlib.contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Raise RefusedError for what stands in the way of a file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        raise RefusedError(f"append to {path!r}", why=error.strerror or str(error)) from error


# A link, a folder or a pipe where a file should be, a file where a folder should be, a name that
# this disk does not take: none of these mends by waiting.
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)


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


def _read(file: IO[bytes], start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
