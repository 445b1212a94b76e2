"""Files kept while they are brought away, whatever their owner does meanwhile.

A stage prunes its checkpoints, and may do so faster than a slow line takes one. Each is held by a
hard link: it costs nothing as long as the file is there, and its size afterwards. Where there are
no such links it is a copy, if there is ample room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from protocol.publish import temporary_beside
from syncd.delivery.uploads import changed

# With less than this free, nothing is copied, and what nobody needs is let go.
LOW_BYTES = 1 << 30


class Holds:
    """Held files, by the hash of their content, in a private folder. What an earlier daemon was
    about to hold is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()

    def link(self, path: Path) -> Path:
        """Return another name for the file at `path`, until `keep` or `drop`. Raises OSError."""
        held = temporary_beside(self._folder / "held")
        os.link(path, held)
        return held

    def take(self, path: Path, *, copied: bool = False) -> Path:
        """Return a name for the file at `path` that lasts until `keep` or `drop`.

        It is another file if it is to be `copied` and there is room; it is `path` itself where it
        can be neither linked nor copied. Raises OSError, FileNotFoundError among them, and
        DataError when it was written to while it was copied.
        """
        if copied and self._has_room_for(path):
            return self._copy(path)
        try:
            return self.link(path)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no links, or not between these two places
            return self._copy(path) if self._has_room_for(path) else path

    def _has_room_for(self, path: Path) -> bool:
        return self._free() - path.stat().st_size >= LOW_BYTES

    def _copy(self, path: Path) -> Path:
        held, before = temporary_beside(self._folder / "held"), path.stat()
        try:
            shutil.copyfile(path, held)
            after = path.stat()
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise changed("copy a file", path)
        except BaseException:
            held.unlink(missing_ok=True)
            raise
        return held

    def has_let_go(self, held: Path) -> bool:
        """Whether this name of a file is one that only `let_go_oldest` takes away, and has."""
        return held.parent == self._folder and not held.exists()

    def keep(self, held: Path, sha256: str) -> Path:
        """Give a file that was taken the name of its content; return it."""
        if held.parent != self._folder:
            return held
        kept = self._folder / sha256
        if held != kept:
            held.replace(kept)
            held.unlink(missing_ok=True)  # POSIX renames no link to another one of the same file
        return kept

    def drop(self, held: Path) -> None:
        """Let go a file that was taken."""
        if held.parent == self._folder:
            held.unlink(missing_ok=True)

    def find(self, sha256: str) -> Path | None:
        """Return where a content is held, or None."""
        path = self._folder / sha256
        return path if path.exists() else None

    def keep_only(self, contents: Collection[str]) -> None:
        """Let go all contents but these."""
        for path in self._folder.iterdir():
            if path.suffix != ".tmp" and path.name not in contents:
                path.unlink(missing_ok=True)

    def is_disk_low(self) -> bool:
        """Whether what is held costs room that a stage may need."""
        return self._free() < LOW_BYTES

    def let_go_oldest(self) -> bool:
        """Let go the oldest file that nobody else has, if there is one; return whether."""
        alone = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if found.st_nlink == 1:
                    alone.append((found.st_mtime_ns, path))
        if alone:
            min(alone)[1].unlink(missing_ok=True)
        return bool(alone)

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free
