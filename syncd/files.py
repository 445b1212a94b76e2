"""Whole files below `in/` and `store/`: what the worker made, brought to the other end.

At the worker, `LocalFiles` finds what changed, brings larger contents to the remote and says so in
messages. At the controller, and at a fresh worker that recovers what its predecessors left,
`RemoteFiles` keeps what those messages say and puts the files in place.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.messages import Content, DropFile, Message, PutFile
from protocol.names import safe_relative
from protocol.publish import fsync_dir, make_dirs
from syncd.contents import INLINE_BYTES, Contents, file_sha256
from syncd.state import State

SETTLE_SECONDS = 1.0
FOLDERS = ("in/artifacts", "store")
FILES = ("in/checkpoints.json",)
# Files that grow by appending, by their names: they are sent by their new bytes.
GROWING_SUFFIXES = (".jsonl", ".log")
GROWING_PREFIXES = ("events.out.tfevents.",)


def is_growing(name: str) -> bool:
    """Whether a file of this name is taken to grow by appending."""
    return name.endswith(GROWING_SUFFIXES) or name.startswith(GROWING_PREFIXES)


def checked_path(path: str) -> str:
    """Return the path of a file that a worker may name. Raises RefusedError otherwise."""
    safe_relative(path)
    if not path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and path not in FILES:
        raise RefusedError(f"path {path[:120]!r}", why="not one that a worker writes")
    return path


@dataclass(frozen=True, kw_only=True)
class Found:
    """A regular file, as a walk found it."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    mode: int


def walk(root: Path, below: str) -> Iterator[Found]:
    """Yield the regular files below a folder of the shared folder; temporary ones are left out."""
    pending = [below]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(".tmp"):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield Found(
                    path=path,
                    size=found.st_size,
                    mtime_ns=found.st_mtime_ns,
                    inode=found.st_ino,
                    mode=stat.S_IMODE(found.st_mode),
                )


class LocalFiles:
    """Files of this end that go to the other."""

    def __init__(self, state: State, root: Path, contents: Contents) -> None:
        self._state = state
        self._root = root
        self._contents = contents
        self.growing: list[str] = []
        self.problems: dict[str, str] = {}

    def scan(self, is_final: Callable[[str], bool] = lambda path: False) -> bool:
        """Look for files that changed and bring their contents to the remote; may take long.

        Returns whether something is ready to be said. A file that changed within the last second
        waits for the next scan; one that cannot be read is named in `problems`; the rest go on.
        """
        growing: list[str] = []
        seen: set[str] = set()
        problems: dict[str, str] = {}
        ready = False
        for found in self._candidates():
            seen.add(found.path)
            if is_growing(found.path.rpartition("/")[2]):
                growing.append(found.path)
                continue
            try:
                ready |= self._look_at(found, final=is_final(found.path))
            except (OSError, DataError, RefusedError) as error:
                problems[found.path] = f"not sent: {error}"
        self.growing, self.problems = growing, problems
        return self._note_gone(seen) or ready

    def _candidates(self) -> Iterator[Found]:
        for folder in FOLDERS:
            yield from walk(self._root, folder)
        names = {path.rpartition("/")[2]: path for path in FILES}
        for found in walk_flat(self._root, "in"):
            if found.path in names.values():
                yield found

    def _look_at(self, found: Found, *, final: bool) -> bool:
        """Hash a file that changed, and bring it to the remote; return whether it is news."""
        row = self._state.row(
            "SELECT size, mtime_ns, inode, mode FROM local_files WHERE path = ? AND sha256 != ''",
            found.path,
        )
        if row == (found.size, found.mtime_ns, found.inode, found.mode):
            return False
        if not final and time.time_ns() - found.mtime_ns < SETTLE_SECONDS * 1e9:
            return False
        checked_path(found.path)
        sha256 = file_sha256(self._root / found.path)
        if found.size > INLINE_BYTES:
            self._contents.upload(self._root / found.path, sha256)
        self._state.run(
            "INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?, ?, ?, 0)",
            found.path,
            found.size,
            found.mtime_ns,
            found.inode,
            found.mode,
            sha256,
        )
        return True

    def _note_gone(self, seen: set[str]) -> bool:
        rows = self._state.rows("SELECT path FROM local_files WHERE sha256 != ''")
        gone = [path for (path,) in rows if path not in seen]
        for path in gone:
            self._state.run("UPDATE local_files SET sha256 = '', sent = 0 WHERE path = ?", path)
        return bool(gone)

    def collect(self, budget: int) -> list[Message]:
        """Return messages for files that are ready, and mark them as sent."""
        messages: list[Message] = []
        rows = self._state.rows(
            "SELECT path, size, mode, sha256 FROM local_files WHERE sent = 0 ORDER BY rowid"
        )
        for path, size, mode, sha256 in rows:
            if budget <= 0:
                break
            if not sha256:
                messages.append(DropFile(path=path))
                self._state.run("DELETE FROM local_files WHERE path = ?", path)
                continue
            content = self._contents.message(self._root / path, sha256, size)
            if content is None:  # it changed since: the next scan sends what it is now
                self._state.run("DELETE FROM local_files WHERE path = ?", path)
                continue
            messages += [content, PutFile(path=path, size=size, mode=mode, sha256=sha256)]
            self._state.run("UPDATE local_files SET sent = 1 WHERE path = ?", path)
            budget -= 512 + len(content.blob)
        return messages

    def waiting(self, prefixes: tuple[str, ...]) -> bool:
        """Whether a file of which the path begins so is ready, and was not said yet."""
        rows = self._state.rows("SELECT path FROM local_files WHERE sent = 0")
        return any(path.startswith(prefixes) for (path,) in rows)

    def unsent(self) -> int:
        """How many bytes of files wait to be announced."""
        row = self._state.row("SELECT COALESCE(SUM(size), 0) FROM local_files WHERE sent = 0")
        return int(row[0]) if row else 0


def walk_flat(root: Path, below: str) -> Iterator[Found]:
    """Yield the regular files right in a folder."""
    for found in walk(root, below):
        if "/" not in found.path.removeprefix(f"{below}/"):
            yield found


class RemoteFiles:
    """Files of the other end, or of predecessors, that are put in place at this end."""

    def __init__(
        self, state: State, root: Path, contents: Contents, wanted: Callable[[str], bool]
    ) -> None:
        self._state = state
        self._root = root
        self._contents = contents
        self._wanted = wanted
        self.problems: dict[str, str] = {}

    def apply(self, message: Content | PutFile | DropFile) -> None:
        """Keep what a message says. Raises RefusedError for a path that a worker may not name."""
        if isinstance(message, Content):
            self._contents.receive(message)
        elif isinstance(message, PutFile):
            here = 0 if self._wanted(checked_path(message.path)) else 1
            self._state.run(
                "INSERT OR REPLACE INTO remote_files VALUES (?, ?, ?, ?, ?)",
                message.path,
                message.size,
                message.mode,
                message.sha256,
                here,
            )
        else:
            checked_path(message.path)
            self._state.run("DELETE FROM remote_files WHERE path = ?", message.path)
            if self._wanted(message.path):
                (self._root / message.path).unlink(missing_ok=True)

    def missing(self) -> list[str]:
        """Paths of wanted files that are not in place yet."""
        return [path for (path,) in self._state.rows(_MISSING)]

    def fetch(self) -> bool:
        """Put wanted files in place; return whether all are. What fails is kept in `problems`.

        Raises RemoteError when the remote cannot be reached.
        """
        for path in self.missing():
            row = self._state.row(
                "SELECT size, mode, sha256 FROM remote_files WHERE path = ?", path
            )
            if row is None:
                continue
            size, mode, sha256 = int(row[0]), int(row[1]), str(row[2])
            try:
                self._place(path, size, mode, sha256)
            except (DataError, RefusedError, OSError) as error:
                self.problems[path] = f"not received: {error}"
                continue
            self.problems.pop(path, None)
            self._state.run(
                "UPDATE remote_files SET here = 1 WHERE path = ? AND sha256 = ?", path, sha256
            )
            self._contents.forget(sha256)
        return not self.missing()

    def _place(self, path: str, size: int, mode: int, sha256: str) -> None:
        target = self._root / path
        if not self._contents.room_for(size):
            raise DataError("receive a file", path=target, why="the disk is full")
        make_dirs(target.parent)
        if target.parent.resolve() != (self._root.resolve() / path).parent:
            raise RefusedError("receive a file", path=target, why="a folder of it is a link")
        self._contents.place(sha256, target, mode=mode)
        fsync_dir(target.parent)


_MISSING = "SELECT path FROM remote_files WHERE here = 0 ORDER BY size"
