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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.errors import RefusedError
from protocol.logs import drop_redraws
from protocol.messages import Append
from protocol.publish import fsync_dir, make_dirs, publish_bytes, remove_leftovers
from syncd.delivery.files import inside
from syncd.delivery.parked import Parked
from syncd.holes import STEP, data_from, read_from
from syncd.log_parts import is_log, rotate, rotated
from syncd.state import State

log = logging.getLogger("syncd")

READ_BYTES = 1024 * 1024
MARK_BYTES = 256


class Tails:
    """The sending side. `root` is the shared folder; paths are relative to it."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root
        self._unread: dict[str, str] = {}
        self._odd: set[str] = set()

    def problems(self) -> dict[str, str]:
        """Files that could not be read when they were last looked at: path → why."""
        found = dict.fromkeys(self._odd, "left out: a link, or no regular file") | self._unread
        return {path: why for path, why in found.items() if os.path.lexists(self._root / path)}

    def collect(self, path: str, budget: int, *, terminal: bool) -> list[Append]:
        """Return what was appended to a file since the last call, `budget` raw bytes at most.

        With `terminal` it is a log: states of a line that were drawn over are left out, and so is
        what its budget has freed. Moves the cursors: call it inside a transaction. A missing file
        gives nothing, and so does one that cannot be read, which is named in `problems` and tried
        again the next time.
        """
        found: list[Append] = []
        known = self._known(path)
        try:
            with contextlib.ExitStack() as stack:
                for file in self._open_parts(path, stack):
                    tail = known.pop(os.fstat(file.fileno()).st_ino, _Tail())
                    segment, whole = self._advance(path, file, tail, budget, terminal=terminal)
                    if segment is not None:
                        found.append(segment)
                        budget -= segment.end - segment.start
                    if not whole:
                        return found  # the older part first, to its end
        except OSError as error:
            self._note_unread(path, error)
            return found
        self._unread.pop(path, None)
        for inode in known:
            self._state.run("DELETE FROM tails WHERE path = ? AND inode = ?", path, inode)
        return found

    def _advance(
        self, path: str, file: IO[bytes], tail: _Tail, budget: int, *, terminal: bool
    ) -> tuple[Append | None, bool]:
        """Return the next segment of one part, and whether the part was then read to its end.

        All is read before the cursor is moved. Raises OSError.
        """
        there = os.fstat(file.fileno())
        if not _is_same(file, there.st_size, tail):
            tail = _Tail(secrets.token_hex(8), 0)
        elif there.st_size == tail.sent:
            return None, True
        segment, sent = None, tail.sent
        if there.st_size > sent and budget > 0:
            most = min(budget, READ_BYTES)
            start, data = read_segment(file, sent, there.st_size, most, log_file=terminal)
            blob = drop_redraws(data) if terminal else data
            sent = start + len(data)
            if data:
                segment = Append(path=path, stream=tail.stream, start=start, end=sent, blob=blob)
        mark = _mark(file, sent)
        self._state.run(
            "INSERT OR REPLACE INTO tails VALUES (?, ?, ?, ?, ?)",
            path,
            there.st_ino,
            tail.stream,
            sent,
            mark,
        )
        return segment, sent >= there.st_size

    def _note_unread(self, path: str, error: OSError) -> None:
        why = f"cannot be read: {error.strerror or error}"
        if self._unread.get(path) != why:
            log.warning("%s: %s", path, why)
        self._unread[path] = why

    def _known(self, path: str) -> dict[int, _Tail]:
        rows = self._state.rows("SELECT inode, stream, sent, mark FROM tails WHERE path = ?", path)
        return {int(i): _Tail(str(stream), int(sent), str(mark)) for i, stream, sent, mark in rows}

    def behind(self, path: str) -> int:
        """How many bytes of a file, and of its part before, can be collected and were not yet.

        Nobody waits for a file that cannot be read.
        """
        if path in self._unread:
            return 0
        known = self._known(path)
        total = 0
        for file in (rotated(self._root / path), self._root / path):
            try:
                found = file.lstat()
                if not stat.S_ISREG(found.st_mode):
                    continue
                sent = known[found.st_ino].sent if found.st_ino in known else 0
                at = sent if 0 <= sent <= found.st_size else 0
                total += found.st_size - (_first_byte(file, at) if is_log(path) else at)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._note_unread(path, error)
                return 0
        return total

    def _open_parts(self, path: str, stack: contextlib.ExitStack) -> list[IO[bytes]]:
        """Open a file and the part before it, older first, as they were at one moment."""
        current = self._root / path
        while True:
            parts = [_open(part, stack) for part in (current, rotated(current))]
            again = _open(current, stack)
            if _inode(parts[0]) == _inode(again):  # else it was rotated meanwhile
                break
        odd = parts[0] is None and os.path.lexists(current)
        (self._odd.add if odd else self._odd.discard)(path)
        return [file for file in reversed(parts) if file is not None]


@dataclass(frozen=True)
class _Tail:
    """How far a file was sent, as which stream, and the mark of what was sent."""

    stream: str = ""
    sent: int = -1
    mark: str = ""


def read_segment(
    file: IO[bytes], at: int, end: int, most: int, *, log_file: bool
) -> tuple[int, bytes]:
    """Return where the next segment of a file begins, `at` or later, and its bytes.

    Later only in a log, of which the budget has freed what lies before. Zeros in any other file are
    its program's own.
    """
    if log_file:
        return read_from(file, at, end, most)
    return at, _read(file, at, min(most, end - at))


def _first_byte(path: Path, at: int) -> int:
    """Return where the bytes that a log still has, from `at` on, begin. Raises OSError."""
    if path.lstat().st_size < STEP:  # the usual case, without a look inside
        return at
    with open(path, "rb", buffering=0, opener=_open_as_it_is) as file:
        return data_from(file.fileno(), at)


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
    """Return a digest of the first of the bytes that were sent, and one of the last.

    A file that was emptied and written anew, and another one that was given the same inode, are
    told apart by it.
    """
    return " ".join(
        hashlib.sha256(_read(file, at, min(sent, MARK_BYTES))).hexdigest()[:16]
        for at in _marked(sent)
    )


def _marked(sent: int) -> tuple[int, int]:
    return 0, max(sent - MARK_BYTES, 0)


def _is_same(file: IO[bytes], size: int, tail: _Tail) -> bool:
    """Whether a file begins with what was sent of it. What was freed says nothing against it."""
    if not tail.stream or size < tail.sent:
        return False
    kept, now = tail.mark.split(), _mark(file, tail.sent).split()
    return len(kept) == len(now) and all(
        before == after or data_from(file.fileno(), at) > at
        for before, after, at in zip(kept, now, _marked(tail.sent), strict=True)
    )


class Joins:
    """The receiving side."""

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
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
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
