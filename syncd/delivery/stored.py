"""The controller's word that it has the worker's chunks: where the remote is a folder on its disk.

A bridge keeps no hashes, and to read a checkpoint back over it would cost the line that it came by.
So the controller, which has the objects at hand, takes the hash of each chunk once, and says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from protocol.messages import Content, Stored
from protocol.wire import Role
from syncd.delivery.chunks import parse
from syncd.state import State

log = logging.getLogger("syncd")

AT_ONCE = 500  # chunks in one message
# Steps of a chunk.
LOOK, RIGHT, SAID = range(3)


class StoredChunks:
    """The worker's chunks that are on this disk. Its cursors are in the state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def expect(self, content: Content) -> None:
        """Have the chunks of a content looked at. Raises RefusedError when a piece names none.

        Call it inside a transaction.
        """
        if sum(piece.length for piece in content.pieces) < content.size:
            return  # it is still being sent
        for path in {piece.object for piece in content.pieces}:
            if parse(path)[0].role is Role.WORKER:
                self._state.run("INSERT OR IGNORE INTO stored VALUES (?, ?)", path, LOOK)

    def look(self, folder: Path | None) -> bool:
        """Look at the chunks that are new, in the remote's folder on this disk; may take long.

        Returns whether there is something to be said. What is not whole is looked at again.
        """
        if folder is None:
            return False
        for (path,) in self._state.rows("SELECT object FROM stored WHERE step = ?", LOOK):
            if _is_whole(folder, path):
                self._state.run("UPDATE stored SET step = ? WHERE object = ?", RIGHT, path)
        return self._state.row("SELECT 1 FROM stored WHERE step = ? LIMIT 1", RIGHT) is not None

    def collect(self) -> Iterator[Stored]:
        """Yield what is to be said; call it, and draw from it, inside a transaction."""
        found = [path for (path,) in self._rows(RIGHT)]
        if found:
            self._state.run("UPDATE stored SET step = ? WHERE step = ?", SAID, RIGHT)
        yield from _messages(found)

    def restate(self) -> Iterator[Stored]:
        """Yield what was said."""
        yield from _messages([path for (path,) in self._rows(SAID)])

    def pack_up(self, folder: Path | None) -> None:
        """Forget the chunks that are not there any more."""
        if folder is None:
            return
        for (path,) in self._state.rows("SELECT object FROM stored"):
            if not (folder / path).exists():
                self._state.run("DELETE FROM stored WHERE object = ?", path)

    def _rows(self, step: int) -> list[tuple[str]]:
        return self._state.rows("SELECT object FROM stored WHERE step = ? ORDER BY object", step)


def _messages(paths: list[str]) -> Iterator[Stored]:
    for at in range(0, len(paths), AT_ONCE):
        yield Stored(objects=tuple(paths[at : at + AT_ONCE]))


def _is_whole(folder: Path, path: str) -> bool:
    """Whether a chunk is what its name says; it outlives a power cut then."""
    _, name = parse(path)
    try:
        # Some systems write back only what is open for writing.
        with open(folder / path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != name.length:
                return False
            right = hashlib.file_digest(file, "sha256").hexdigest() == name.sha256
            os.fsync(file.fileno())
    except OSError as error:
        log.debug("chunk %s is not here: %s", path, error)
        return False
    return right
