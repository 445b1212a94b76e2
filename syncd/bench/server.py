"""The webdav server that a benchmark measures against, as the file bridge runs it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from protocol.errors import RunFailedError
from syncd.bridge.server import LEAN
from syncd.platform import die_with_parent
from syncd.rclone.binary import find_rclone

T = TypeVar("T")

PATIENCE = 120.0
ROUND_TRIP = 0.05


def until(found: Callable[[], T | None], what: str, *, seconds: float = PATIENCE) -> T:
    """Return what `found` finds, asked every other millisecond. Raises RunFailedError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.002)
    raise RunFailedError("syncd bench", why=f"{what} did not come about within {seconds:.0f} s")


def clean_environment() -> dict[str, str]:
    """Return our environment without the settings of the caller's own ends."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SYNCD_")}


@dataclass(frozen=True, kw_only=True)
class Server:
    """A webdav server on the loopback, and who may use it."""

    folder: Path
    port: int
    user: str
    password: str = field(repr=False)
    process: subprocess.Popen[bytes] = field(repr=False)

    def url(self, port: int) -> str:
        """Return what a worker is given as its remote, where it reaches the server by `port`."""
        return f"http://{self.user}:{self.password}@127.0.0.1:{port}"

    def section(self, port: int) -> str:
        """Return the server's part of an rclone configuration, as a person would write it."""
        return (
            f"type = webdav\nurl = http://127.0.0.1:{port}\nvendor = other\n"
            f"user = {self.user}\npass = {_obscured(self.password)}\n"
        )


def _obscured(password: str) -> str:
    done = subprocess.run(
        [find_rclone(), "obscure", "-"], input=password.encode(), capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def free_port() -> int:
    """Return a port of the loopback that nobody has now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve_webdav(folder: Path, cache: Path, flags: Sequence[str] = LEAN) -> Iterator[Server]:
    """Serve a folder by `rclone serve webdav`, as the file bridge does, while the block runs."""
    port, user, password = free_port(), "user", secrets.token_hex(16)
    command = [str(find_rclone()), "serve", "webdav", str(folder), "--addr", f"127.0.0.1:{port}"]
    # Not 0: rclone 1.75 then keeps a core busy for ever after the first upload.
    command += ["--dir-cache-time", "1ms", "--cache-dir", str(cache), *flags]
    process = subprocess.Popen(
        die_with_parent(command),
        env={**clean_environment(), "RCLONE_USER": user, "RCLONE_PASS": password},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _listens(port), "the webdav server")
        yield Server(folder=folder, port=port, user=user, password=password, process=process)
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
