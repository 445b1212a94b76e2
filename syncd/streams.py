"""Growing files: sent by their new bytes, put together again at the other end.

A file's incarnation is a stream, and a stream's bytes are sent in order, each once, as `Append`
messages. The sender knows a file by its inode, so a rotated one is sent to its end before the new
one begins. The receiver keeps in its state how far the stream was read and how long the file then
was, and cuts off what a crash may have left beyond.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from protocol.logs import drop_redraws
from protocol.messages import Append
from protocol.publish import fsync_dir, make_dirs
from syncd.state import State

READ_BYTES = 1024 * 1024
ROTATE_BYTES = 64 * 1024 * 1024


def rotated(path: Path) -> Path:
    """The name under which the part before the newest is kept."""
    return path.with_name(path.name + ".1")


def rotate(path: Path, *, limit: int = ROTATE_BYTES) -> None:
    """Move a file of more than `limit` bytes out of the way; only the newest two parts are kept."""
    try:
        if path.stat().st_size > limit:
            os.replace(path, rotated(path))
            fsync_dir(path.parent)
    except FileNotFoundError:
        return


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
        current = self._root / path
        rows = self._state.rows("SELECT inode, stream, sent FROM tails WHERE path = ?", path)
        known = {int(inode): (str(stream), int(sent)) for inode, stream, sent in rows}
        for file in (rotated(current), current):
            try:
                stat = file.stat()
            except FileNotFoundError:
                continue
            if file is not current and stat.st_ino not in known:
                continue  # rotated before it was ever looked at, and so sent by nobody
            stream, sent = known.pop(stat.st_ino, ("", 0))
            if not stream or stat.st_size < sent:
                stream, sent = secrets.token_hex(8), 0
            if stat.st_size > sent and budget > 0:
                data = _read(file, sent, min(budget, READ_BYTES, stat.st_size - sent))
                blob = drop_redraws(data) if terminal else data
                end = sent + len(data)
                found.append(Append(path=path, stream=stream, start=sent, end=end, blob=blob))
                sent, budget = end, budget - len(data)
            self._state.run(
                "INSERT OR REPLACE INTO tails VALUES (?, ?, ?, ?)", path, stat.st_ino, stream, sent
            )
            if sent < stat.st_size:
                return found  # the older part first, to its end
        for inode in known:
            self._state.run("DELETE FROM tails WHERE path = ? AND inode = ?", path, inode)
        return found

    def behind(self, path: str) -> int:
        """How many bytes of a file were not collected yet."""
        try:
            stat = (self._root / path).stat()
        except FileNotFoundError:
            return 0
        row = self._state.row(
            "SELECT sent FROM tails WHERE path = ? AND inode = ?", path, stat.st_ino
        )
        return max(stat.st_size - (int(row[0]) if row else 0), 0)


def _read(path: Path, start: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(length)


class Joins:
    """The receiving side."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root

    def apply(self, message: Append) -> None:
        """Append a segment to its file, durably. Call it inside a transaction."""
        stream, read, _ = self._row(message.path)
        if stream != message.stream:
            rotate(self._root / message.path)
            read = 0
        if message.end <= read:
            return
        gap = message.start - read
        note = f"\n[syncd] {gap} bytes of this log are missing here\n".encode() if gap > 0 else b""
        self._append(message.path, note + message.blob, message.stream, message.end)

    def append(self, path: str, data: bytes) -> None:
        """Append bytes of this end's own to a file of its own, durably."""
        self._append(path, data, "", 0)

    def _row(self, path: str) -> tuple[str, int, int]:
        row = self._state.row("SELECT stream, read, length FROM joins WHERE path = ?", path)
        return (str(row[0]), int(row[1]), int(row[2])) if row else ("", 0, -1)

    def _append(self, path: str, data: bytes, stream: str, read: int) -> None:
        file = self._root / path
        make_dirs(file.parent)
        new = not file.exists()
        length = self._row(path)[2]
        fd = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            there = os.fstat(fd).st_size
            # What lies beyond the length on record was written just before a crash. A file that
            # was rotated, or that someone cut, is shorter and goes on from where it ends.
            at = there if length < 0 or there < length else length
            os.ftruncate(fd, at)
            os.lseek(fd, at, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        if new:
            fsync_dir(file.parent)
        self._state.run(
            "INSERT OR REPLACE INTO joins VALUES (?, ?, ?, ?)", path, stream, read, at + len(data)
        )
