"""How we reach our rclone: a Unix socket in a private folder, TCP with a password elsewhere."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from http.client import HTTPConnection
from pathlib import Path
from typing import Protocol

from protocol.errors import RemoteError
from protocol.publish import make_dirs
from syncd.platform import has_modes, has_unix_sockets, is_ours

# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the closing zero among them.
_LONGEST_SOCKET_PATH = 100


class Endpoint(Protocol):
    """Where rclone listens, and how to speak to it there."""

    def flags(self) -> list[str]:
        """Return rclone's flags; never a secret, since every user can read command lines."""

    def environ(self) -> dict[str, str]:
        """Return the variables to add to rclone's environment."""

    def headers(self) -> dict[str, str]:
        """Return the headers that each request needs."""

    def connection(self) -> HTTPConnection:
        """Return a new connection, not yet connected."""

    def clear(self) -> None:
        """Make its place fit for a new rclone: called before each start.

        Raises RemoteError when the place is another user's, OSError.
        """

    def remove(self) -> None:
        """Leave nothing in its place: the last rclone is gone."""


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        # Where a cleaner has taken the folder away, another user may have made one of its name.
        if not _is_our_folder(self._path.parent):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another user's", str(self._path))
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except BaseException:
            self.close()
            raise


class UnixEndpoint:
    """A socket that only this user can reach, since its folder is 0700.

    It lies in `folder`, or in a short one of our own below the system's temporary folder, where a
    cleaner may take it away while we run, and nobody else would.
    """

    def __init__(self, folder: Path) -> None:
        self._short = _short_folder(folder)
        self.path = (self._short or folder) / "rc.sock"

    def flags(self) -> list[str]:
        return ["--rc-addr", f"unix://{self.path}", "--rc-no-auth"]

    def environ(self) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        return {}

    def connection(self) -> HTTPConnection:
        return _UnixConnection(self.path)

    def clear(self) -> None:
        if self._short:
            private_folder(self._short)
        self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        # What cannot be removed hinders nobody: the next start clears it.
        with contextlib.suppress(OSError):
            if _is_our_folder(self.path.parent):
                self.path.unlink(missing_ok=True)
                if self._short:
                    self._short.rmdir()


class TcpEndpoint:
    """A port on the loopback, with credentials that change each time."""

    def __init__(self) -> None:
        self._user, self._password = secrets.token_hex(8), secrets.token_hex(24)
        self._port = _free_port()

    def flags(self) -> list[str]:
        return ["--rc-addr", f"127.0.0.1:{self._port}"]

    def environ(self) -> dict[str, str]:
        return {"RCLONE_RC_USER": self._user, "RCLONE_RC_PASS": self._password}

    def headers(self) -> dict[str, str]:
        token = base64.b64encode(f"{self._user}:{self._password}".encode()).decode("ascii")
        return {"Authorization": f"Basic {token}"}

    def connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port)

    def clear(self) -> None:
        # Another program may have taken the port meanwhile.
        self._port = _free_port()

    def remove(self) -> None:
        """A port leaves nothing."""


def endpoint(folder: Path) -> Endpoint:
    """Return the best endpoint of this system; `folder` is private to us."""
    return UnixEndpoint(folder) if has_unix_sockets() else TcpEndpoint()


def private_folder(folder: Path) -> Path:
    """Make `folder` when missing and close it to other users. Raises RemoteError if it is theirs.

    The folder comes back absolute.
    """
    make_dirs(folder, mode=0o700)
    if not _is_our_folder(folder):
        raise RemoteError(
            "make a private folder",
            path=folder,
            why="it is not a folder of this user",
            hint="Remove it, or set TMPDIR to a folder of your own.",
        )
    if has_modes() and stat.S_IMODE(folder.lstat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder.absolute()


def _is_our_folder(path: Path) -> bool:
    """Whether a folder, and no link to one, is at `path` and belongs to this user."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and is_ours(found)


def _short_folder(folder: Path) -> Path | None:
    """Return the folder that stands for `folder` where that one's path is too long."""
    if len(os.fsencode(folder.absolute() / "rc.sock")) <= _LONGEST_SOCKET_PATH:
        return None
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"syncd-{digest}"


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
