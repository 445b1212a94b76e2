"""Real servers for tests to put a remote on. Each is a process that a test may kill and restart.

    server = SERVERS["sftp"](folder)
    server.start()
    config.write_text(server.section("there"))
    remote = RcloneRemote(rclone, server.fs("there"))

Each listens on the loopback alone, keeps its port over restarts, and asks for credentials of its
own. Another kind is one more class here with the members of `Server`, and one more line in
`SERVERS`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
import pytest
from waiting import eventually

from syncd.platform import die_with_parent
from syncd.rclone.binary import find_rclone


class Server(Protocol):
    """A server that keeps its files in a folder of its own.

    `kind` is rclone's type of it; `root`, where the files of the remote `fs(name)` lie.
    """

    kind: str
    root: Path

    def __init__(self, folder: Path) -> None:
        """`folder` need not exist; all that the server needs is made in it."""

    def start(self) -> None:
        """Start it, on the port that it had before, and wait until it listens."""

    def kill(self) -> None:
        """End it at once, with every connection."""

    def section(self, name: str, *, password: str | None = None) -> str:
        """Its part of an rclone configuration, under this name; with a password that is wrong."""

    def fs(self, name: str) -> str:
        """What rclone calls the remote's folder, given the name of the section."""


def obscured(password: str) -> str:
    """Return a password in the form of rclone's configuration."""
    command = [find_rclone(), "obscure", "-"]
    done = subprocess.run(command, input=password.encode(), capture_output=True, check=True)
    return done.stdout.decode().strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Process:
    """A server's process on one port."""

    host = "127.0.0.1"
    prefix: Sequence[str] = ()  # runs a command somewhere else, such as in a network namespace

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.root = folder / "files"
        self.root.mkdir(exist_ok=True)
        self.port = free_port()
        self.user, self.password = "user", secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.prefix, *die_with_parent(self.command())],
            env={**os.environ, **self.environ()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(self._listens, within=30, what=lambda: f"it does not listen: {self}")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process:
            # sshd's connections are processes in sessions of their own.
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    child.kill()
            self.process.kill()
            self.process.wait()
            self.process = None

    def fs(self, name: str) -> str:
        return f"{name}:"

    def __str__(self) -> str:
        return " ".join(self.command())

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self}"
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            return False
        return True


class _RcloneServer(_Process):
    """`rclone serve KIND`."""

    kind: str

    def command(self) -> list[str]:
        command = [str(find_rclone()), "serve", self.kind, str(self.root)]
        command += ["--addr", f"{self.host}:{self.port}", "--cache-dir", str(self.folder / "cache")]
        # Directories are cached for five minutes by default. Not 0: rclone 1.75 then keeps a core
        # busy for ever after the first upload.
        return [*command, "--dir-cache-time", "1ms"]

    def environ(self) -> dict[str, str]:
        # Not in the command: every user can read command lines.
        return {"RCLONE_USER": self.user, "RCLONE_PASS": self.password}


class WebdavServer(_RcloneServer):
    kind = "webdav"

    def section(self, name: str, *, password: str | None = None) -> str:
        return (
            f"[{name}]\ntype = webdav\nurl = http://{self.host}:{self.port}\n"
            f"user = {self.user}\npass = {obscured(password or self.password)}\n"
        )


class SftpServer(_RcloneServer):
    kind = "sftp"

    def section(self, name: str, *, password: str | None = None) -> str:
        return (
            f"[{name}]\ntype = sftp\nhost = {self.host}\nport = {self.port}\n"
            f"user = {self.user}\npass = {obscured(password or self.password)}\n"
        )


class S3Server(_RcloneServer):
    """Its buckets are the folders of `files/`; the remote is a folder in one of them."""

    kind = "s3"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        bucket = self.root / "bucket"
        bucket.mkdir(exist_ok=True)
        self._served, self.root = self.root, bucket / "shared"

    def command(self) -> list[str]:
        command = super().command()
        command[3] = str(self._served)
        return command

    def environ(self) -> dict[str, str]:
        # A list in CSV of one pair, which holds the comma.
        return {"RCLONE_AUTH_KEY": f'"{self.user},{self.password}"'}

    def section(self, name: str, *, password: str | None = None) -> str:
        return (
            f"[{name}]\ntype = s3\nprovider = Rclone\nendpoint = http://{self.host}:{self.port}\n"
            f"access_key_id = {self.user}\nsecret_access_key = {password or self.password}\n"
        )

    def fs(self, name: str) -> str:
        return f"{name}:bucket/shared"


class OpenSshServer(_Process):
    """OpenSSH's sshd with a host key, a client's key and a configuration of its own.

    Skips the test where there is no sshd.
    """

    kind = "sftp"

    def __init__(self, folder: Path) -> None:
        found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if found is None:
            pytest.skip("there is no sshd: install openssh-server")
        super().__init__(folder)
        self._sshd = found
        self.user = getpass.getuser()
        for key in ("host", "client"):
            ssh_keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(ssh_keygen, check=True, stdin=subprocess.DEVNULL)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/client.pub\nPidFile none\n"
            f"ListenAddress {self.host}:{self.port}\nPermitRootLogin yes\nUsePAM no\n"
            # Folders above the test's may be anyone's to write to, such as /tmp.
            "StrictModes no\nSubsystem sftp internal-sftp\nPrintMotd no\n"
        )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # which sshd demands

    def command(self) -> list[str]:
        return [self._sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]

    def section(self, name: str, *, password: str | None = None) -> str:
        secret = f"pass = {obscured(password)}" if password else f"key_file = {self.folder}/client"
        return (
            f"[{name}]\ntype = sftp\nhost = {self.host}\nport = {self.port}\n"
            f"user = {self.user}\n{secret}\n"
        )

    def fs(self, name: str) -> str:
        return f"{name}:{self.root}"


SERVERS: dict[str, type[Server]] = {
    "webdav": WebdavServer,
    "sftp": SftpServer,
    "s3": S3Server,
    "openssh": OpenSshServer,
}
