"""Checkpoints of a run's earlier worker, put in place a group at a time, whole or not at all.

A group is fetched into the private folder, and moved to where its stage looks for it once all of
it is here and right. Of one that is not whole nothing is put there: what is wrong with it is named,
and an older one is taken. A full disk is no such fault: that is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError, RefusedError, UserError
from protocol.publish import make_dirs, publishing, rename_durable
from syncd.delivery.contents import Contents, file_sha256
from syncd.delivery.files import CHECKPOINTS, inside, run_of
from syncd.delivery.groups import members
from syncd.delivery.received import release
from syncd.platform import folded_onto
from syncd.rclone.remote import NotFound
from syncd.state import State

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OPEN_END = 1 << 62
# The state's word for which checkpoints were put in place: run → path.
RESTORED = "restored"


class NoRoomError(Exception):
    """The disk is full: more may be fetched when it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inherited:
    """A checkpoint file that an earlier worker had, in its run's groups `first` to `last`; `first`
    is 0 where that worker knew no groups."""

    path: str
    size: int
    mode: int
    sha256: str
    first: int
    last: int


class Restores:
    """Those of a fresh worker. Nothing of the runs that they are of may be started meanwhile."""

    def __init__(
        self,
        state: State,
        root: Path,
        folder: Path,
        contents: Contents,
        *,
        placed: Callable[[str], None] = lambda sha256: None,
    ) -> None:
        """`folder` is private; `placed` is called with the hash of each content that came whole."""
        self._state = state
        self._root = root
        self._folder = folder
        self._contents = contents
        self._placed = placed
        self.problems: dict[str, str] = {}
        self.waits = ""  # why those that are still to come do not

    def missing(self) -> list[str]:
        """Paths of files of which it is not decided whether they can be had."""
        rows = self._state.rows("SELECT path FROM remote_files WHERE here = 0")
        return [path for (path,) in rows if run_of(path)]

    def restored(self, run: str) -> str:
        """Name the checkpoint of a run that was put in place, by its newest file; "" for none."""
        path = str(self._state.get(RESTORED, {}).get(run, ""))
        return path.removeprefix(f"{CHECKPOINTS}/{run}/")

    def fetch(self) -> bool:
        """Put each run's newest whole group in place; return whether that is settled for all.

        What fails is kept in `problems`. Raises RemoteError when the remote cannot be reached.
        """
        self.waits = ""
        for run in sorted({run_of(path) for path in self.missing()}):
            try:
                self._restore(run)
            except NoRoomError as error:
                self.waits = str(error)
        if not self.waits:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._folder)
        return not self.waits

    def _restore(self, run: str) -> None:
        files = self._of(run)
        done: list[Inherited] = []
        for group in self._groups(run, files):
            if self._put_whole(group):
                done = group
                break
            self._take_back(group)
        alone = [[each] for each in files if not each.first]  # of a worker that knew no groups
        done = done + [each for one in alone if self._put_whole(one) for each in one]
        if files and not done:
            self.problems[f"{CHECKPOINTS}/{run}"] = "none of its checkpoints is here whole"
        with self._state.transaction():
            if done:
                name = max(done, key=lambda each: (each.first, each.size, each.path)).path
                self._state.put(RESTORED, {**self._state.get(RESTORED, {}), run: name})
            for each in files:
                if each in done:
                    self._placed(each.sha256)
                self._settle(each.path, each.sha256)
            self._leave_out_beside(run, {_folder(f) for f in files} - {_folder(f) for f in done})

    def _settle(self, path: str, sha256: str) -> None:
        self._state.run("UPDATE remote_files SET here = 1 WHERE path = ?", path)
        release(self._state, self._contents, sha256)

    def _leave_out_beside(self, run: str, folders: Collection[str]) -> None:
        """Leave out what grows in folders of which all else is left out: they are not there."""
        rows = self._state.rows("SELECT path, sha256 FROM remote_files WHERE here = 0")
        for path, sha256 in rows:
            folder = path.rpartition("/")[0]
            if folder in folders and folder != f"{CHECKPOINTS}/{run}":
                self._settle(path, sha256)

    def _of(self, run: str) -> list[Inherited]:
        below = f"{CHECKPOINTS}/{run}/"
        rows = self._state.rows(
            "SELECT path, size, mode, sha256, first, until FROM remote_files"
            " WHERE path >= ? AND path < ? ORDER BY path",
            *(below, below[:-1] + "0"),
        )
        return [
            Inherited(
                path=path,
                size=size,
                mode=mode,
                sha256=sha256,
                first=first,
                last=until or (_OPEN_END if first else 0),
            )
            for path, size, mode, sha256, first, until in rows
            if run_of(path)
        ]

    def _groups(self, run: str, files: Sequence[Inherited]) -> Iterator[list[Inherited]]:
        """Yield the groups of which all files are known, the newest first."""
        rows = self._state.rows(
            "SELECT number, files FROM remote_groups WHERE run = ? ORDER BY number DESC", run
        )
        for number, count in rows:
            held = members(files, number)
            if len(held) == count:
                yield held

    def _put_whole(self, group: Sequence[Inherited]) -> bool:
        """Put all of these files in place, or none; return whether. Raises NoRoomError."""
        moved: list[Path] = []
        each = group[0]
        try:
            self._check_room(group)
            for each in group:
                self._stage(each)
            for each in group:
                self._move(each, moved)
        except (NotFound, DataError, RefusedError, OSError) as error:
            self._raise_if_full(error)
            for path in moved:
                path.unlink(missing_ok=True)
            why = error.why if isinstance(error, UserError) else error
            self.problems[each.path] = f"not received, nor what it was saved with: {why}"
            return False
        return True

    def _check_room(self, group: Sequence[Inherited]) -> None:
        needed = sum(each.size for each in group if not self._is_here(each))
        if not self._contents.room_for("", needed):
            raise NoRoomError(f"the disk is full: they take {needed} bytes more")

    def _raise_if_full(self, error: Exception) -> None:
        full = isinstance(error, OSError) and error.errno in _NO_ROOM
        if full or not self._contents.room_for("", 0):
            raise NoRoomError(f"the disk is full: {error}") from error

    def _is_here(self, file: Inherited) -> bool:
        return self._staged(file).exists() or self._is_in_place(file)

    def _is_in_place(self, file: Inherited) -> bool:
        """Whether a file was moved by a daemon that was killed then."""
        path = self._root / file.path
        with contextlib.suppress(OSError, DataError):
            if path.is_file() and not path.is_symlink() and path.stat().st_size == file.size:
                return file_sha256(path, file.size) == file.sha256
        return False

    def _staged(self, file: Inherited) -> Path:
        name = hashlib.sha256(f"{file.sha256} {file.path}".encode()).hexdigest()
        return self._folder / name

    def _stage(self, file: Inherited) -> None:
        """Fetch a file into the private folder; what is there already is whole."""
        target = inside(self._root, file.path)
        if target.is_dir() and not target.is_symlink():
            raise RefusedError("receive a file", path=target, why="a folder is there")
        if self._is_here(file):
            return
        make_dirs(self._folder, mode=0o700)
        self._contents.place(file.sha256, self._staged(file), mode=file.mode, size=file.size)

    def _move(self, file: Inherited, moved: list[Path]) -> None:
        staged, target = self._staged(file), inside(self._root, file.path)
        if not staged.exists():
            return  # it is in place
        make_dirs(target.parent)
        if other := folded_onto(target):
            why = f"on this disk it would be the file {other!r}, which is there"
            raise RefusedError("receive a file", path=target, why=why)
        try:
            rename_durable(staged, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(staged, target, file.mode)
        moved.append(target)

    @staticmethod
    def _copy(staged: Path, target: Path, mode: int) -> None:
        with open(staged, "rb") as source, publishing(target, mode=mode & 0o777 | 0o600) as file:
            shutil.copyfileobj(source, file)
        staged.unlink()

    def _take_back(self, group: Sequence[Inherited]) -> None:
        """Remove what a daemon that was killed then had put in place of a group."""
        for each in group:
            if self._is_in_place(each):
                os.unlink(self._root / each.path)


def _folder(file: Inherited) -> str:
    return file.path.rpartition("/")[0]
