"""How we reach our rclone: a Unix socket in a private folder, TCP with a password elsewhere."""

from __future__ import annotations

import base64
import contextlib
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
        """Remove what an rclone that is gone has left."""


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except BaseException:
            self.close()
            raise


class UnixEndpoint:
    """A socket that only this user can reach, since its folder is 0700."""

    def __init__(self, folder: Path) -> None:
        self.path = _socket_folder(folder) / "rc.sock"

    def flags(self) -> list[str]:
        return ["--rc-addr", f"unix://{self.path}", "--rc-no-auth"]

    def environ(self) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        return {}

    def connection(self) -> HTTPConnection:
        return _UnixConnection(self.path)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


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


def endpoint(folder: Path) -> Endpoint:
    """Return the best endpoint of this system; `folder` is private to us."""
    return UnixEndpoint(folder) if has_unix_sockets() else TcpEndpoint()


def private_folder(folder: Path) -> Path:
    """Make `folder` when missing and close it to other users. Raises RemoteError if it is theirs.

    The folder comes back absolute.
    """
    make_dirs(folder, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not is_ours(found):
        raise RemoteError(
            "make a private folder",
            path=folder,
            why="it is not a folder of this user",
            hint="Remove it, or set TMPDIR to a folder of your own.",
        )
    if has_modes() and stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder.absolute()


def _socket_folder(folder: Path) -> Path:
    """Return `folder`, or a short one that stands for it when a path is too long."""
    if len(os.fsencode(folder.absolute() / "rc.sock")) <= _LONGEST_SOCKET_PATH:
        return folder
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    return private_folder(Path(tempfile.gettempdir()) / f"syncd-{digest}")


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
