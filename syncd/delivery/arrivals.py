"""Contents that are fetched while the other end is still sending them.

What is fetched early lies in a file of its own in the private folder, and its hash is taken on the
way: once all of it is there and is what its hash says, the file is moved to where it belongs. It is
forgotten when the daemon ends, and when anything is wrong with it: the content is then fetched as
any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from protocol.errors import DataError, RefusedError
from protocol.messages import Piece
from syncd.delivery.chunks import Block
from syncd.rclone.remote import NotFound

log = logging.getLogger("syncd")

Read = Callable[[Sequence[Piece]], Iterator[Block]]


@dataclass
class _Begun:
    """A content of which `got` bytes of its first pieces, `pieces`, are here."""

    path: Path
    size: int
    pieces: tuple[Piece, ...] = ()
    got: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Arrivals:
    """Those of one end. Safe to use from several threads, of which one fetches."""

    def __init__(self, folder: Path) -> None:
        """What lies in `folder` is left by an earlier daemon, and is removed."""
        self._folder = folder
        self._lock = threading.Lock()
        self._begun: dict[str, _Begun] = {}
        for leftover in folder.glob("*.arriving"):
            leftover.unlink(missing_ok=True)

    def expect(self, sha256: str, size: int) -> None:
        """Have a content fetched early, of which some pieces are known."""
        with self._lock:
            path = self._folder / f"{sha256}.arriving"
            self._begun.setdefault(sha256, _Begun(path=path, size=size))

    def expected(self) -> list[str]:
        """The contents that are to be fetched early."""
        with self._lock:
            return list(self._begun)

    def forget(self, sha256: str) -> None:
        """Drop what was fetched early of a content."""
        with self._lock:
            begun = self._begun.pop(sha256, None)
        if begun:
            begun.path.unlink(missing_ok=True)

    def held(self, sha256: str) -> int:
        """How many bytes of a content are here."""
        with self._lock:
            begun = self._begun.get(sha256)
        return begun.got if begun else 0

    def extend(self, sha256: str, pieces: Sequence[Piece], read: Read) -> bool:
        """Fetch the pieces that are new; return whether what is here is all of these.

        Raises RemoteError when the remote cannot be reached: what has come stays.
        """
        with self._lock:
            begun = self._begun.get(sha256)
        if begun is None:
            return False
        if begun.pieces != tuple(pieces[: len(begun.pieces)]):
            self.forget(sha256)
            return False
        try:
            with open(begun.path, "ab" if begun.got else "wb") as file:
                file.truncate(begun.got)
                self._append(begun, pieces[len(begun.pieces) :], read, file)
        except (NotFound, DataError, RefusedError, OSError) as error:
            log.debug("content %s is not fetched early: %s", sha256, error)
            self.forget(sha256)
            return False
        return True

    def _append(self, begun: _Begun, pieces: Sequence[Piece], read: Read, file: IO[bytes]) -> None:
        """Fetch pieces; each counts once it is in the file."""
        digest, waiting, got = begun.digest.copy(), deque(pieces), 0
        for block in read(pieces):
            digest.update(block)
            file.write(block)
            got += len(block)
            if got < waiting[0].length:
                continue
            file.flush()
            os.fdatasync(file.fileno())  # bit by bit, rather than all of it in the end
            begun.digest, begun.got, got = digest.copy(), begun.got + got, 0
            begun.pieces += (waiting.popleft(),)
            if begun.got > begun.size:
                raise DataError("fetch a file", path=begun.path, why="it is larger than announced")

    @contextlib.contextmanager
    def whole(self, sha256: str, pieces: Sequence[Piece], read: Read) -> Iterator[Path | None]:
        """Yield the file of a content if it was begun and is all there and right, or None.

        The block moves the file to where it belongs; what it leaves is removed.
        """
        there = self.extend(sha256, pieces, read)
        with self._lock:
            begun = self._begun.get(sha256)
        right = there and begun is not None and begun.digest.hexdigest() == sha256
        try:
            yield begun.path if begun is not None and right else None
        finally:
            self.forget(sha256)
