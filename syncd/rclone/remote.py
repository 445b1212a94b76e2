"""One folder on an rclone remote, and the few things we do there.

Files on it are immutable objects, never overwritten (docs/protocol.md), so nothing here needs a
modification time, a hash of the remote's, or an atomic replace.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protocol.errors import DataError, RemoteError
from protocol.publish import rename_durable, temporary_beside
from syncd.rclone.errors import Fatal, NotFound, Transient, shown
from syncd.rclone.rcd import Rclone

__all__ = ["Entry", "Fatal", "NotFound", "RcloneRemote", "Remote", "Transient", "retry"]

T = TypeVar("T")

CALL_SECONDS = 120.0
# rclone itself ends a transfer that stands still; this bounds one that crawls.
TRANSFER_SECONDS = 3600.0
_NAMED = re.compile(r"(?P<name>[\w][\w.+@ -]*):")
_INLINE = re.compile(r":(?P<type>[^,:/\\]+)[,:]")


@dataclass(frozen=True)
class Entry:
    """A file or folder in a listing; `size` in bytes, -1 where the remote does not say."""

    name: str
    size: int
    is_dir: bool


class Remote(Protocol):
    """A folder that both ends reach. Paths are relative to it and separated by `/`.

    Every method may raise Transient (try again) or Fatal (a person must act), and ends when the
    connection is closed.
    """

    def list(self, folder: str) -> list[Entry]:
        """Return what is in a folder, not below it; empty when the folder is missing."""

    def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's content. Raises NotFound, or DataError when longer than `limit`."""

    def download(self, path: str, target: Path) -> None:
        """Make the local file `target`, atomically and durably. Raises NotFound."""

    def upload(self, source: Path, path: str) -> None:
        """Make the remote file `path`, which must be new, from a local one.

        What is cut short is invisible, or has another name or a smaller size.
        """

    def delete(self, path: str) -> None:
        """Remove a file; nothing when it is missing."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and all in it; nothing when it is missing."""

    def make_root(self) -> None:
        """Create the remote's folder when it is missing."""

    def check(self) -> None:
        """Raise RemoteError, with what to do next, unless the remote's folder is there."""

    def kind(self) -> str:
        """Return rclone's type of the remote: "local", "webdav", "drive", ...

        "" when only environment variables define it.
        """

    def local_path(self) -> Path | None:
        """Return the folder when it lies on this machine, where it can be watched, or None."""


class RcloneRemote:
    """The folder that rclone calls `fs`: `name:`, `name:folder`, or a local path."""

    def __init__(self, rclone: Rclone, fs: str) -> None:
        self.fs = fs
        self._rclone = rclone

    def __repr__(self) -> str:
        return f"RcloneRemote({shown(self.fs)!r})"

    def list(self, folder: str) -> list[Entry]:
        options = {"noModTime": True, "noMimeType": True}
        try:
            answer = self._call("operations/list", remote=folder, opt=options)
        except NotFound:
            return []
        return [Entry(e["Name"], e["Size"], e["IsDir"]) for e in answer["list"]]

    def read(self, path: str, *, limit: int) -> bytes:
        if "]" not in self.fs:
            return self._rclone.get(self.fs, path, limit=limit, timeout=CALL_SECONDS)
        # rclone's URL of a file, `/[remote]/path`, ends the remote at the first bracket.
        with tempfile.TemporaryDirectory(prefix="syncd-") as folder:
            copy = Path(folder) / "copy"
            self._copy_here(path, copy)
            if copy.stat().st_size > limit:
                where = f"{shown(self.fs)}/{path}"
                raise DataError(
                    "read from the remote", path=where, why=f"longer than {limit} bytes"
                )
            return copy.read_bytes()

    def download(self, path: str, target: Path) -> None:
        temporary = temporary_beside(target.absolute())
        try:
            self._copy_here(path, temporary)
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
            rename_durable(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def upload(self, source: Path, path: str) -> None:
        source = source.absolute()
        params = {
            "srcFs": str(source.parent),
            "srcRemote": source.name,
            "dstFs": self.fs,
            "dstRemote": path,
            # Without the check, a remote that allows two files of one name (Drive) would get
            # them when an upload is tried again.
            "_config": _transfer_config(check_target=self._allows_doubles),
        }
        try:
            self._rclone.call("operations/copyfile", params, TRANSFER_SECONDS)
        except NotFound as error:
            # Not the remote's file, which is yet to be: the source, or the folder meanwhile.
            kind = Transient if source.exists() else Fatal
            raise kind(error.what, path=source, why=error.why) from error

    def delete(self, path: str) -> None:
        with contextlib.suppress(NotFound):
            self._call("operations/deletefile", remote=path)

    def delete_folder(self, folder: str) -> None:
        if not folder.strip("/."):
            raise ValueError(f"folder {folder!r} would be the whole remote")
        with contextlib.suppress(NotFound):
            self._call("operations/purge", remote=folder)

    def make_root(self) -> None:
        self._call("operations/mkdir", remote="")

    def check(self) -> None:
        try:
            self._call("operations/list", remote="", opt={"dirsOnly": True, "noModTime": True})
        except NotFound as error:
            raise RemoteError(
                "reach the remote",
                path=shown(self.fs),
                why="there is no such folder",
                hint="`syncd init` makes it; if it should be there, check its name and its mount.",
            ) from error

    def kind(self) -> str:
        return self._kind

    def local_path(self) -> Path | None:
        info = self._info
        return Path(info["Root"]) if info["Features"]["IsLocal"] else None

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._rclone.call("operations/fsinfo", {"fs": self.fs}, CALL_SECONDS)

    @cached_property
    def _allows_doubles(self) -> bool:
        return bool(self._info["Features"]["DuplicateFiles"])

    @cached_property
    def _kind(self) -> str:
        if os.path.isabs(self.fs):
            return "local"  # on Windows, C: looks like a name
        inline = _INLINE.match(self.fs)
        if inline:
            return inline["type"]
        named = _NAMED.match(self.fs)
        if not named:
            return "local"
        _ = self._info  # raises, and says why, when there is no such remote
        answer = self._rclone.call("config/get", {"name": named["name"]}, CALL_SECONDS)
        return str(answer.get("type", ""))

    def _call(self, verb: str, **params: Any) -> dict[str, Any]:
        return self._rclone.call(verb, {"fs": self.fs, **params}, CALL_SECONDS)

    def _copy_here(self, path: str, target: Path) -> None:
        params = {
            "srcFs": self.fs,
            "srcRemote": path,
            "dstFs": str(target.parent),
            "dstRemote": target.name,
            # In place: `target` is a temporary file already, and what a kill leaves has its name.
            "_config": {**_transfer_config(check_target=False), "Inplace": True},
        }
        self._rclone.call("operations/copyfile", params, TRANSFER_SECONDS)


def _transfer_config(*, check_target: bool) -> dict[str, bool | int]:
    """Return rclone's settings for a new, immutable file whose reader checks its hash."""
    return {
        "NoCheckDest": not check_target,
        "IgnoreTimes": True,
        "IgnoreChecksum": True,
        "MultiThreadStreams": 1,
    }


def retry(
    action: Callable[[], T],
    *,
    stop: threading.Event,
    attempts: int = 6,
    base: float = 0.5,
    most: float = 30.0,
) -> T:
    """Return what `action` returns, trying again after Transient, `attempts` times in all.

    Waits a random time up to `base` * 2^n seconds, at most `most` ("full jitter": Brooker,
    "Exponential Backoff and Jitter", AWS 2015). Setting `stop` ends the waiting: the last
    Transient is raised, as it is when the attempts are used up.
    """
    for attempt in range(attempts - 1):
        try:
            return action()
        except Transient:
            if stop.wait(random.uniform(0.0, min(most, base * 2**attempt))):
                raise
    return action()
