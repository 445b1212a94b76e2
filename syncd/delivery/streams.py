"""Growing files, sent by their new bytes.

A file's incarnation is a stream, and a stream's bytes are sent in order, each once, as `Append`
messages. The sender knows a file by its inode, so a rotated one is sent to its end before the new
one begins. `syncd.delivery.joins` puts them together again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.files import open_regular
from protocol.logs import drop_redraws
from protocol.messages import Append
from syncd.delivery.files import Found
from syncd.holes import STEP, data_from, read_from
from syncd.log_parts import is_log, rotated
from syncd.state import State

log = logging.getLogger("syncd")

READ_BYTES = 1024 * 1024
MARK_BYTES = 256
# A file that was changed within the last moment may be changed again without showing it.
FRESH_SECONDS = 2.0

# Both parts of a file; None for a part that is missing.
Look = tuple[Found | None, ...]


class Tails:
    """The sending side. `root` is the shared folder; paths are relative to it."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root
        self._unread: dict[str, str] = {}
        self._odd: set[str] = set()
        # Files that were collected to their end, and how they looked then: there may be thousands
        # of old ones.
        self._settled: dict[str, Look] = {}

    def is_settled(self, path: str) -> bool:
        """Whether all of a file was collected, and nothing has touched it since."""
        with contextlib.suppress(OSError):  # `collect` names what cannot be read
            return path in self._settled and self._settled[path] == self._look(path)
        return False

    def _look(self, path: str) -> Look:
        """Raises OSError."""
        return tuple(_found(part) for part in self._parts(path))

    def _parts(self, path: str) -> tuple[Path, Path]:
        """A file, and the part before it."""
        current = self._root / path
        return current, rotated(current)

    def problems(self) -> dict[str, str]:
        """Files that could not be read when they were last looked at: path → why."""
        found = dict.fromkeys(self._odd, "left out: a link, or no regular file") | self._unread
        return {path: why for path, why in found.items() if os.path.lexists(self._root / path)}

    def collect(
        self, path: str, budget: int, *, terminal: bool, final: bool = True
    ) -> list[Append]:
        """Return what was appended to a file since the last call, `budget` raw bytes at most.

        With `terminal` it is a log: states of a line that were drawn over are left out, and so is
        what its budget has freed. Unless it is `final`, a line that has not ended yet is kept back:
        most likely it is drawn over soon. Moves the cursors: call it inside a transaction. A
        missing file gives nothing, and so does one that cannot be read, which is named in
        `problems` and tried again the next time.
        """
        found: list[Append] = []
        known = self._known(path)
        try:
            look = self._look(path)
            with contextlib.ExitStack() as stack:
                for file in self._open_parts(path, stack):
                    tail = known.pop(os.fstat(file.fileno()).st_ino, _Tail())
                    held = terminal and not final
                    segment, whole = self._advance(
                        path, file, tail, budget, terminal=terminal, held=held
                    )
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
        self._settle(path, look)
        return found

    def _settle(self, path: str, look: Look) -> None:
        """Note that a file need not be read again, if it was read to its end as it looked then."""
        sent = {inode: tail.sent for inode, tail in self._known(path).items()}
        there = [part for part in look if part is not None]
        if there and all(
            sent.get(part.inode) == part.size and part.settled(FRESH_SECONDS) for part in there
        ):
            self._state.on_rollback(self._settled.clear)
            self._settled[path] = look

    def _advance(
        self,
        path: str,
        file: IO[bytes],
        tail: _Tail,
        budget: int,
        *,
        terminal: bool,
        held: bool,
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
            if held and b"\n" not in data and len(data) < most:
                return None, True  # it only draws the last line on
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
        if path in self._unread or self.is_settled(path):
            return 0
        known = self._known(path)
        total = 0
        for file in self._parts(path):
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
        current, before = self._parts(path)
        while True:
            parts = [_open(part, stack) for part in (current, before)]
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
    with open_regular(path, follow=False) as file:
        return data_from(file.fileno(), at)


def _found(path: Path) -> Found | None:
    try:
        return Found.of(path.name, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _inode(file: IO[bytes] | None) -> int | None:
    return os.fstat(file.fileno()).st_ino if file else None


def _open(path: Path, stack: contextlib.ExitStack) -> IO[bytes] | None:
    """Open a regular file; None for what is none, which is never followed or waited for."""
    try:
        return stack.enter_context(open_regular(path, follow=False))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EINVAL):  # a link, a socket, a pipe
            return None
        raise


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
