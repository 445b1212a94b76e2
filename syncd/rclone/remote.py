"""One folder on an rclone remote, and the few things we do there.

Files on it are immutable objects, never overwritten (docs/protocol.md), so nothing here needs a
modification time or an atomic replace; a hash of the remote's spares reading a file back.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protocol.errors import DataError, RemoteError
from syncd.rclone.address import is_address, parse_address
from syncd.rclone.errors import Fatal, NotFound, Transient, Unreachable, shown
from syncd.rclone.patience import Patience
from syncd.rclone.profiles import BRIDGE, WRAPPERS, Pace, Profile, profile_for
from syncd.rclone.rcd import Rclone

__all__ = ["Entry", "Fatal", "NotFound", "RcloneRemote", "Remote", "Transient"]

T = TypeVar("T")

CALL_SECONDS = 120.0
# rclone itself ends a transfer that stands still; this bounds one that crawls.
TRANSFER_SECONDS = 3600.0
# How many files one call deletes: few enough for its answer to come in time.
DELETED_AT_ONCE = 50
# What means something in rclone's patterns.
_GLOB, _ESCAPED = re.compile(r"[\\*?\[\]{}]"), r"\\\g<0>"
_NAMED = re.compile(r"(?P<name>[\w][\w.+@ -]*):")
_INLINE = re.compile(r":(?P<type>[^,:/\\]+)[,:]")
_DEEPEST = 8  # remotes that wrap remotes
# Hashes that a file which was damaged by accident does not share with what it was, the best first.
_STRONG = ("sha256", "sha1", "md5")


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

    def download(self, path: str, target: Path, *, length: int) -> None:
        """Make the local file `target`, which must be new, from one of `length` bytes.

        It is not durable, must not be written to, and is not there when this raises: NotFound, or
        DataError when its length is another.
        """

    def upload(self, source: Path, path: str) -> None:
        """Make the remote file `path`, which must be new, from a local one.

        What is cut short is invisible, or has another name or a smaller size. The local file must
        not be written to afterwards: on the same disk both may be one.
        """

    def replace(self, source: Path, path: str) -> None:
        """Make or overwrite the remote file `path`, which nothing relies on, from a local one."""

    def delete(self, folder: str, names: Sequence[str]) -> None:
        """Remove files of a folder; nothing when they are missing."""

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

    def profile(self) -> Profile:
        """Return how this remote wants to be used, by its type."""

    def hash_kind(self) -> str:
        """Return the strongest hash that the remote has of its files by itself: "sha256", "sha1",
        "md5" (rclone's and hashlib's names), or "" for none of these."""

    def hash_of(self, path: str, kind: str) -> str:
        """Return that hash of a file, in hexadecimal; "" when the remote has none of this file.

        Raises NotFound.
        """

    def local_path(self) -> Path | None:
        """Return the folder when it lies on this machine, where it can be watched, or None."""

    def anchor(self) -> Remote:
        """Return the one of several remotes where workers meet; a single one, itself.

        What must not be done twice is done only when nobody else is seen there.
        """


class RcloneRemote:
    """A folder: `name:` or `name:folder` of rclone's, a local path, or a URL (`rclone.address`)."""

    def __init__(self, rclone: Rclone, name: str, *, treat_as: str = "") -> None:
        """`treat_as` is the type whose profile it gets, in place of its own."""
        self._name = name
        self._treat_as = treat_as
        self._rclone = rclone

    def __str__(self) -> str:
        return shown(self._name)

    @cached_property
    def fs(self) -> str:
        """What rclone calls it; may hold a password."""
        if not is_address(self._name):
            # Where a path has no slash at its end rclone asks first whether it is a file, and on S3
            # takes any failure of that, a link that is down too, for a yes that it remembers.
            local = self._definition(self._name)[0] == "local"
            return self._name if local or self._name.endswith((":", "/")) else f"{self._name}/"
        address = parse_address(self._name)
        answer = self._rclone.call("core/obscure", {"clear": address.password}, CALL_SECONDS)
        return address.connection_string(str(answer["obscured"]))

    def list(self, folder: str) -> list[Entry]:
        options = {"noModTime": True, "noMimeType": True}
        try:
            answer = self._call("operations/list", remote=folder, opt=options)
        except NotFound:
            return []
        found = [Entry(e["Name"], e["Size"], e["IsDir"]) for e in answer["list"]]
        self._refuse_doubled_folders(folder, [entry.name for entry in found if entry.is_dir])
        return found

    def _refuse_doubled_folders(self, folder: str, folders: Sequence[str]) -> None:
        """Raise Fatal when two folders have one name, as a Drive allows: rclone sees but one."""
        for name in set(folders):
            if folders.count(name) > 1:
                raise Fatal(
                    "list the remote",
                    path=f"{shown(self._name)}/{folder}".rstrip("/"),
                    why=f"it has two folders named {name}, and what is in one of them is not seen",
                    hint=f"`rclone dedupe skip {shown(self._name)}` joins them, and loses nothing.",
                )

    def read(self, path: str, *, limit: int) -> bytes:
        if "]" not in self.fs:
            with self._asking(limit) as seconds:
                return self._rclone.get(self.fs, path, limit=limit, timeout=seconds)
        # rclone's URL of a file, `/[remote]/path`, ends the remote at the first bracket.
        with tempfile.TemporaryDirectory(prefix="syncd-") as folder:
            copy = Path(folder) / "copy"
            self._copy_here(path, copy, limit)
            if copy.stat().st_size > limit:
                where = f"{shown(self.fs)}/{path}"
                raise DataError(
                    "read from the remote", path=where, why=f"longer than {limit} bytes"
                )
            return copy.read_bytes()

    def download(self, path: str, target: Path, *, length: int) -> None:
        target = target.absolute()
        folder = self.local_path()
        try:
            if folder is None or not _linked(folder / path, target):
                self._copy_here(path, target, length)
            found = target.lstat().st_size
            if found != length:
                where = f"{shown(self.fs)}/{path}"
                why = f"not whole: {found} of {length} bytes"
                raise DataError("read from the remote", path=where, why=why)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def upload(self, source: Path, path: str) -> None:
        source = source.absolute()
        folder = self.local_path()
        if folder is not None and _linked(source, folder / path):
            return
        # Without the check, a remote that allows two files of one name (Drive) would get them when
        # an upload is tried again.
        self._copy_there(source, path, check_target=self._profile.check_target)

    def replace(self, source: Path, path: str) -> None:
        self._copy_there(source.absolute(), path, check_target=True)

    def _copy_there(self, source: Path, path: str, *, check_target: bool) -> None:
        params = {
            "srcFs": str(source.parent),
            "srcRemote": source.name,
            "dstFs": self.fs,
            "dstRemote": path,
            "_config": _transfer_config(check_target=check_target),
        }
        size = source.stat().st_size if source.exists() else 0
        self._pace.wait()
        try:
            with self._asking(size) as seconds:
                self._rclone.call("operations/copyfile", params, seconds)
        except NotFound as error:
            # Not the remote's file, which is yet to be: the source, or the folder meanwhile.
            kind = Transient if source.exists() else Fatal
            raise kind(error.what, path=source, why=error.why) from error

    def delete(self, folder: str, names: Sequence[str]) -> None:
        # One listing for many; `operations/deletefile` looks each of them up.
        fs = f"{self.fs}{'' if self.fs.endswith((':', '/')) else '/'}{folder}/"
        for at in range(0, len(names), DELETED_AT_ONCE):
            some = names[at : at + DELETED_AT_ONCE]
            rules = [*(f"+ /{_GLOB.sub(_ESCAPED, name)}" for name in some), "- *"]
            with self._asking() as seconds, contextlib.suppress(NotFound):
                params = {"fs": fs, "_filter": {"FilterRule": rules}}
                self._rclone.call("operations/delete", params, seconds)

    def delete_folder(self, folder: str) -> None:
        if not folder.strip("/."):
            raise ValueError(f"folder {folder!r} would be the whole remote")
        with contextlib.suppress(NotFound):
            params = {"fs": self.fs, "remote": folder}
            self._rclone.call("operations/purge", params, TRANSFER_SECONDS)

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
                hint="`syncd watch` makes it; if it should be there, check its name and its mount.",
            ) from error

    def kind(self) -> str:
        return self._kind

    def profile(self) -> Profile:
        return self._profile

    def anchor(self) -> Remote:
        return self

    def hash_kind(self) -> str:
        return next((kind for kind in _STRONG if kind in (self._info["Hashes"] or ())), "")

    def hash_of(self, path: str, kind: str) -> str:
        options = {"showHash": True, "hashTypes": [kind], "noModTime": True, "noMimeType": True}
        item = self._call("operations/stat", remote=path, opt=options).get("item")
        if item is None:
            where = f"{shown(self._name)}/{path}"
            raise NotFound("ask the remote for a hash", path=where, why="it is not there")
        return str((item.get("Hashes") or {}).get(kind, ""))

    def local_path(self) -> Path | None:
        info = self._info
        return Path(info["Root"]) if info["Features"]["IsLocal"] else None

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._rclone.call("operations/fsinfo", {"fs": self.fs}, CALL_SECONDS)

    @cached_property
    def _profile(self) -> Profile:
        if self._treat_as:
            return profile_for(self._treat_as, {})
        if is_address(self._name):
            return BRIDGE
        kind, options = self._definition(self.fs)
        for _ in range(_DEEPEST):
            if kind not in WRAPPERS:
                break
            kind, options = self._definition(options.get("remote", ""))
        return profile_for(kind, options)

    @cached_property
    def _patience(self) -> Patience:
        return Patience(self._profile.answer_seconds)

    @cached_property
    def _pace(self) -> Pace:
        return Pace(self._profile.creations_per_second)

    @cached_property
    def _kind(self) -> str:
        _ = self._info  # raises, and says why, when there is no such remote
        return self._definition(self.fs)[0]

    def _definition(self, fs: str) -> tuple[str, dict[str, str]]:
        """Return rclone's type of a remote, and its options where they are in the configuration."""
        if os.path.isabs(fs):
            return "local", {}  # on Windows, C: looks like a name
        inline = _INLINE.match(fs)
        if inline:
            return inline["type"], {}
        named = _NAMED.match(fs)
        if not named:
            return "local", {}
        answer = self._rclone.call("config/get", {"name": named["name"]}, CALL_SECONDS)
        return str(answer.get("type", "")), answer

    @contextlib.contextmanager
    def _asking(self, size: int = 0) -> Iterator[float]:
        """Yield how long to wait for the answer to a call that moves so many bytes."""
        try:
            with self._patience.waiting(size) as seconds:
                yield seconds
        except Unreachable:
            # rclone's own pauses have grown by now, and would shrink by and by only, over many
            # calls after the link is back. With what it keeps of the remote it forgets them too.
            with contextlib.suppress(RemoteError):
                self._rclone.call("fscache/clear", {}, CALL_SECONDS)
            raise

    def _call(self, verb: str, **params: Any) -> dict[str, Any]:
        with self._asking() as seconds:
            return self._rclone.call(verb, {"fs": self.fs, **params}, seconds)

    def _copy_here(self, path: str, target: Path, length: int) -> None:
        params = {
            "srcFs": self.fs,
            "srcRemote": path,
            "dstFs": str(target.parent),
            "dstRemote": target.name,
            # In place: `target` is a temporary file already, and what a kill leaves has its name.
            "_config": {**_transfer_config(check_target=False), "Inplace": True},
        }
        with self._asking(length) as seconds:
            self._rclone.call("operations/copyfile", params, seconds)


def _linked(source: Path, target: Path) -> bool:
    """Make `target` the same file as `source`, which is new, if they are on one disk that can."""
    try:
        os.link(source, target)
    except OSError:  # rclone can, or says why it cannot
        return False
    return True


def _transfer_config(*, check_target: bool) -> dict[str, bool | int]:
    """Return rclone's settings for a new, immutable file whose reader checks its hash."""
    return {
        "NoCheckDest": not check_target,
        "IgnoreTimes": True,
        "IgnoreChecksum": True,
        "MultiThreadStreams": 1,
    }
