"""Files of the other end, or of predecessors, that are put in place at this end.

At the controller, and at a fresh worker that recovers what its predecessors left, `RemoteFiles`
keeps what messages say of files (`syncd.delivery.files`), and puts them in place. A run's
checkpoints are put in place by `syncd.delivery.restores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.messages import CheckpointsGrouped, Content, DropFile, Message, PutFile
from protocol.publish import make_dirs, remove_leftovers
from syncd.delivery.contents import Contents
from syncd.delivery.files import CHECKPOINTS, checked_path, inside, run_of
from syncd.platform import folded_onto
from syncd.rclone.remote import NotFound
from syncd.state import State


class RemoteFiles:
    """Those of one end."""

    def __init__(
        self,
        state: State,
        root: Path,
        contents: Contents,
        wanted: Callable[[str], bool],
        *,
        placed: Callable[[str], None] = lambda sha256: None,
    ) -> None:
        """`placed` is called with the hash of each content that has come whole."""
        self._placed = placed
        self._state = state
        self._root = root
        self._contents = contents
        self._wanted = wanted
        self.problems: dict[str, str] = {}

    def apply(self, message: Content | PutFile | CheckpointsGrouped | DropFile) -> None:
        """Keep what a message says. Raises RefusedError for a path that a worker may not name."""
        if isinstance(message, Content):
            self._contents.receive(message)
            return
        if isinstance(message, CheckpointsGrouped):
            checked_path(f"{CHECKPOINTS}/{message.run_id}/file")
            self._state.run(
                "INSERT OR REPLACE INTO remote_groups VALUES (?, ?, ?)",
                *(message.run_id, message.number, message.files),
            )
            return
        before = self._state.row(
            "SELECT sha256, size, mode FROM remote_files WHERE path = ?",
            checked_path(message.path),
        )
        if isinstance(message, PutFile):
            if not before or before != (message.sha256, message.size, message.mode):
                self._state.run(
                    "INSERT OR REPLACE INTO remote_files (path, size, mode, sha256, here)"
                    " VALUES (?, ?, ?, ?, ?)",
                    message.path,
                    message.size,
                    message.mode,
                    message.sha256,
                    0 if self._wanted(message.path) else 1,
                )
            self._state.run(
                "UPDATE remote_files SET first = ?, until = ? WHERE path = ?",
                *(message.first, message.until, message.path),
            )
            self._release(message.sha256)
        else:
            # What has arrived here stays: the worker's disk is no reason to lose a copy.
            self._state.run("DELETE FROM remote_files WHERE path = ?", message.path)
            self.problems.pop(message.path, None)
        if before:
            self._release(str(before[0]))

    def _release(self, sha256: str) -> None:
        release(self._state, self._contents, sha256)

    def paths(self) -> list[str]:
        """Paths of all files that are known."""
        return [path for (path,) in self._state.rows("SELECT path FROM remote_files")]

    def restart(self, messages: Sequence[Message]) -> None:
        """Forget all that these messages, of a state, do not say again. What has arrived stays."""
        said = {message.path for message in messages if isinstance(message, PutFile)}
        for path in set(self.paths()) - said:
            self.apply(DropFile(path=path))
        self._state.run("DELETE FROM remote_groups")

    def missing(self) -> list[str]:
        """Paths of wanted files that are not in place yet, but for checkpoints in groups."""
        return [path for (path,) in self._state.rows(_MISSING) if not run_of(path)]

    def fetch(self, *, sparing: bool = False) -> bool:
        """Put wanted files in place; return whether all are. What fails is kept in `problems`.

        If `sparing`, what is there already stays: it was made here since. Raises RemoteError when
        the remote cannot be reached.
        """
        for path in self.missing():
            if sparing and (self._root / path).exists():
                self._state.run("UPDATE remote_files SET here = 1 WHERE path = ?", path)
                self.problems.pop(path, None)
                continue
            row = self._state.row(
                "SELECT size, mode, sha256 FROM remote_files WHERE path = ?", path
            )
            if row is None:
                continue
            size, mode, sha256 = int(row[0]), int(row[1]), str(row[2])
            try:
                self._place(path, size, mode, sha256)
            except (NotFound, DataError, RefusedError, OSError) as error:
                self.problems[path] = f"not received: {error}"
                continue
            self.problems.pop(path, None)
            with self._state.transaction():
                self._placed(sha256)
                self._state.run(
                    "UPDATE remote_files SET here = 1 WHERE path = ? AND sha256 = ?", path, sha256
                )
                self._release(sha256)
        return not self.missing()

    def _place(self, path: str, size: int, mode: int, sha256: str) -> None:
        target = inside(self._root, path)
        if not self._contents.room_for(sha256, size):
            raise DataError("receive a file", path=target, why="the disk is full")
        make_dirs(target.parent)
        if other := folded_onto(target):
            why = f"on this disk it would be the file {other!r}, which is there"
            raise RefusedError("receive a file", path=target, why=why)
        remove_leftovers(target.parent, of=target.name)  # of a fetch that was killed
        self._contents.place(sha256, target, mode=mode, size=size)


_MISSING = "SELECT path FROM remote_files WHERE here = 0 ORDER BY size"


def release(state: State, contents: Contents, sha256: str) -> None:
    """Drop this end's copy of a content that no file waits for."""
    if not state.row("SELECT 1 FROM remote_files WHERE sha256 = ? AND here = 0 LIMIT 1", sha256):
        contents.forget(sha256)
