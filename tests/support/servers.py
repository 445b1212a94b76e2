"""Real servers for tests to put a remote on. Each is a process that a test may kill and restart.

Another kind (sftp, s3, OpenSSH) is one more class here with the same members, and one more line in
`SERVERS`.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from pathlib import Path
from typing import Protocol

from waiting import eventually

from syncd.platform import die_with_parent
from syncd.rclone.binary import find_rclone


class Server(Protocol):
    """A server of the folder `root`; `section` is its part of an rclone configuration."""

    root: Path

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def section(self, name: str, *, password: str | None = None) -> str: ...


def obscured(password: str) -> str:
    """Return a password in the form of rclone's configuration."""
    command = [find_rclone(), "obscure", "-"]
    done = subprocess.run(command, input=password.encode(), capture_output=True, check=True)
    return done.stdout.decode().strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WebdavServer:
    """`rclone serve webdav` with a user and a password."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.user, self.password = "user", secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(find_rclone()), "serve", "webdav", str(self.root)]
        # Directories are cached for five minutes by default. Not 0: rclone 1.75 then keeps a core
        # busy for ever after the first upload.
        command += ["--addr", f"127.0.0.1:{self.port}", "--dir-cache-time", "1ms"]
        environ = {**os.environ, "RCLONE_USER": self.user, "RCLONE_PASS": self.password}
        self.process = subprocess.Popen(
            die_with_parent(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._listens, what="the WebDAV server did not start")

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def section(self, name: str, *, password: str | None = None) -> str:
        return (
            f"[{name}]\ntype = webdav\nurl = http://127.0.0.1:{self.port}\n"
            f"user = {self.user}\npass = {obscured(password or self.password)}\n"
        )

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


SERVERS: dict[str, type[WebdavServer]] = {"webdav": WebdavServer}
