"""Whole files below `in/` and `store/`: what the worker made, brought to the other end.

`LocalFiles` finds what changed, brings larger contents to the remote and says so in messages, for
`syncd.delivery.received` at the other end. Checkpoints go by rules of their own.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.logs import one_line
from protocol.messages import DropFile, Message, PutFile
from protocol.names import safe_relative
from syncd.delivery.contents import INLINE_BYTES, Contents, file_sha256
from syncd.delivery.uploads import Source
from syncd.platform import change_time_ns
from syncd.state import State

SETTLE_SECONDS = 1.0
GROWTH = 1.5
FOLDERS = ("in/artifacts", "store")
FILES = ("in/checkpoints.json",)
CHECKPOINTS = "store/checkpoints"
# Files that grow by appending, by their names: they are sent by their new bytes.
GROWING_SUFFIXES = (".jsonl", ".log")
GROWING_PREFIXES = ("events.out.tfevents.",)
LEFT_OUT = "left out: a link, or no regular file"


def is_growing(path: str) -> bool:
    """Whether a file is taken, by its name, to grow by appending."""
    name = path.rpartition("/")[2]
    return name.endswith(GROWING_SUFFIXES) or name.startswith(GROWING_PREFIXES)


def run_of(path: str) -> str:
    """Return the run id of which a file is a checkpoint, "" if it is none."""
    run, slash, _ = path.removeprefix(f"{CHECKPOINTS}/").partition("/")
    return run if slash and path.startswith(f"{CHECKPOINTS}/") and not is_growing(path) else ""


def checked_path(path: str) -> str:
    """Return the path of a file that a worker may name. Raises RefusedError otherwise."""
    safe_relative(path)
    if not path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and path not in FILES:
        raise RefusedError(f"path {path[:120]!r}", why="not one that a worker writes")
    return path


def inside(root: Path, path: str) -> Path:
    """Return where a file of a shared folder lies. Raises RefusedError when a link leads elsewhere.

    Of what is there already nothing is trusted: a stage, or a person, may have made the link.
    """
    target = root / path
    if target.parent.resolve() != (root.resolve() / path).parent:
        raise RefusedError(f"place {path!r}", why="a folder of it is a link")
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A regular file, as a walk found it.

    `changed_ns` is when content, mode or links last changed, by this machine's clock: no program
    sets it. `made_ns` is the modification time.
    """

    path: str
    size: int
    changed_ns: int
    made_ns: int
    inode: int
    mode: int

    @classmethod
    def of(cls, path: str, found: os.stat_result) -> Found:
        return cls(
            path=path,
            size=found.st_size,
            changed_ns=change_time_ns(found),
            made_ns=found.st_mtime_ns,
            inode=found.st_ino,
            mode=stat.S_IMODE(found.st_mode),
        )

    def settled(self, seconds: float) -> bool:
        """Whether it has been as it is for so long. A time that has yet to come counts as long."""
        return not 0 <= time.time_ns() - self.changed_ns < seconds * 1e9


def walk(root: Path, below: str, problems: dict[str, str]) -> Iterator[Found]:
    """Yield the regular files below a folder of the shared folder.

    What ends in `.tmp` is left out. What else cannot be taken is named in `problems`: links, which
    are never followed, devices and the like, folders that cannot be read.
    """
    pending = [below]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems[one_line(folder)] = f"cannot be read: {error.strerror}"
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if entry.name.endswith(".tmp"):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield Found.of(path, found)
            else:
                problems[one_line(path)] = LEFT_OUT


class LocalFiles:
    """Files of this end that go to the other.

    A scan also finds the names of files that grow, in `growing`, whose new bytes others send.
    """

    def __init__(self, state: State, root: Path, contents: Contents) -> None:
        self._state = state
        self._root = root
        self._contents = contents
        self.growing: list[str] = []
        self.problems: dict[str, str] = {}
        self.unsettled = False  # whether the last scan left files for the next one
        self._failed = False  # whether there were some that it could not bring
        self._uploading = 0  # bytes of what a scan has found and is bringing to the remote

    def scan(self, is_final: Callable[[str], bool] = lambda path: False) -> bool:
        """Look for files that changed and bring their contents to the remote; may take long.

        Returns whether something is ready to be said. A file that changed within the last second
        waits for the next scan; one that cannot be read is named in `problems`; the rest go on.
        """
        growing: list[str] = []
        self.unsettled = False
        seen: set[str] = set()
        problems: dict[str, str] = {}
        changed: list[Found] = []
        for found in self._candidates(problems):
            seen.add(found.path)
            try:
                checked_path(found.path)
                if run_of(found.path):
                    continue
                final = is_final(found.path)
                if is_growing(found.path):
                    growing.append(found.path)
                    new = self._has_grown(found, final=final)
                else:
                    new = self._is_new(found, final=final)
                if new:
                    changed.append(found)
            except RefusedError as error:
                problems[one_line(found.path)] = f"not sent: {error}"
        self._uploading, self._contents.uploaded = sum(found.size for found in changed), 0
        try:
            news = self._bring(changed, problems)
        finally:
            self._uploading = 0
        self._failed = any(why != LEFT_OUT for why in problems.values())
        self.growing, self.problems = growing, problems
        with self._state.transaction():
            for found, sha256 in news:
                self._note(found, sha256)
            gone = self._note_gone(seen)
        return gone or bool(news)

    def _candidates(self, problems: dict[str, str]) -> Iterator[Found]:
        for folder in FOLDERS:
            yield from walk(self._root, folder, problems)
        for path in FILES:
            with contextlib.suppress(FileNotFoundError):
                found = (self._root / path).lstat()
                if stat.S_ISREG(found.st_mode):
                    yield Found.of(path, found)

    def _is_new(self, found: Found, *, final: bool) -> bool:
        row = self._state.row(
            "SELECT size, changed_ns, inode, mode FROM local_files WHERE path = ? AND sha256 != ''",
            found.path,
        )
        if row == (found.size, found.changed_ns, found.inode, found.mode):
            return False
        ready = final or found.settled(SETTLE_SECONDS)
        self.unsettled |= not ready
        return ready

    def _has_grown(self, found: Found, *, final: bool) -> bool:
        """Whether a growing file is worth sending whole, for a worker that takes over.

        The other end has it by its new bytes; sent whole only when it has grown by half, it costs
        at most three times its size over its life.
        """
        row = self._state.row(
            "SELECT size FROM local_files WHERE path = ? AND sha256 != ''", found.path
        )
        if row is None:
            return found.size > 0
        size = int(row[0])
        return found.size < size or found.size >= size * GROWTH or (final and found.size > size)

    def _bring(self, changed: Sequence[Found], problems: dict[str, str]) -> list[tuple[Found, str]]:
        """Bring the larger of these files to the remote; return which are ready, by their hashes.

        A file is hashed while those before it are on their way.
        """
        hashed: list[tuple[Found, str]] = []

        def sources() -> Iterator[Source]:
            for found in changed:
                path = self._root / found.path
                try:
                    sha256 = file_sha256(path, found.size)
                except (OSError, DataError) as error:
                    problems[one_line(found.path)] = f"not sent: {error}"
                    continue
                hashed.append((found, sha256))
                if found.size > INLINE_BYTES:
                    awaited = found.path.startswith("in/") and not is_growing(found.path)
                    yield Source(path=path, sha256=sha256, size=found.size, awaited=awaited)

        failed = self._contents.upload(sources())
        for path, error in failed.items():
            problems[one_line(path.relative_to(self._root).as_posix())] = f"not sent: {error}"
        return [each for each in hashed if self._root / each[0].path not in failed]

    def _note(self, found: Found, sha256: str) -> None:
        self._state.run(
            "INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?, ?, ?, 0)",
            found.path,
            found.size,
            found.changed_ns,
            found.inode,
            found.mode,
            sha256,
        )

    def _note_gone(self, seen: set[str]) -> bool:
        rows = self._state.rows("SELECT path FROM local_files WHERE sha256 != ''")
        gone = [path for (path,) in rows if path not in seen and not self.is_unread(path)]
        for path in gone:
            self._state.run("UPDATE local_files SET sha256 = '', sent = 0 WHERE path = ?", path)
        return bool(gone)

    def is_unread(self, path: str) -> bool:
        """Whether a file may well be there: it lies in a folder that cannot be read."""
        return path.startswith(tuple(f"{each}/" for each in self.problems))

    def collect(self, budget: int) -> list[Message]:
        """Return messages for files that are ready, and mark them as sent."""
        messages: list[Message] = [*self._contents.coming()]
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

    def live(self) -> Iterator[tuple[str, Path]]:
        """Yield the contents that this end stands for, with their files."""
        rows = self._state.rows("SELECT path, sha256 FROM local_files WHERE sha256 != ''")
        return ((str(sha256), self._root / path) for path, sha256 in rows)

    def restate(self) -> list[Message]:
        """Return messages for all files that were sent."""
        messages: list[Message] = []
        for path, size, mode, sha256 in self._state.rows(
            "SELECT path, size, mode, sha256 FROM local_files WHERE sent = 1 AND sha256 != ''"
        ):
            content = self._contents.again(sha256, size)
            if content is not None:
                messages += [content, PutFile(path=path, size=size, mode=mode, sha256=sha256)]
        return messages

    def send_again(self, lost: Collection[str]) -> None:
        """Take files of which these contents were lost for new ones."""
        for sha256 in lost:
            self._state.run("DELETE FROM local_files WHERE sha256 = ?", sha256)

    def said(self) -> set[str]:
        """Paths of the files that were said."""
        rows = self._state.rows("SELECT path FROM local_files WHERE sent = 1 AND sha256 != ''")
        return {str(path) for (path,) in rows}

    def waiting(self, prefixes: tuple[str, ...]) -> bool:
        """Whether a file of which the path begins so is ready, and was not said yet."""
        rows = self._state.rows("SELECT path FROM local_files WHERE sent = 0")
        return any(path.startswith(prefixes) for (path,) in rows)

    def is_behind(self) -> bool:
        """Whether the last scan left or failed with some file, or one was not said yet."""
        return self.unsettled or self._failed or self.waiting(("",))

    def unsent(self) -> int:
        """How many bytes of files are on their way, or wait to be announced."""
        row = self._state.row("SELECT COALESCE(SUM(size), 0) FROM local_files WHERE sent = 0")
        on_their_way = max(0, self._uploading - self._contents.uploaded)
        return on_their_way + (int(row[0]) if row else 0)
