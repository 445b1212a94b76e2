"""The bridge's server: one `rclone serve webdav` over the objects and, read-only, what cells fetch.

They are folders of one tree, which rclone's `combine` makes; a `union` all of whose parts are
`:ro` is what makes serve/ and bootstrap/ read-only. A union must have two parts, so an empty folder
is the other. Nothing else of the shared folder is in that tree, and links in it are not followed.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from protocol.errors import BusyError, RemoteError, UsageError
from protocol.publish import make_dirs, publish_bytes
from syncd.bridge import BOOTSTRAP, OBJECTS, SERVE, USER
from syncd.child import STOP_SECONDS, Child
from syncd.rclone.address import is_loopback
from syncd.rclone.binary import find_rclone

_WHAT = "start the bridge"
# As Linux and macOS say it, and Windows.
_TAKEN = ("address already in use", "Only one usage of each socket address")


# Whoever reads an object checks it against its name: the server's own MD5 of an upload takes three
# quarters of its processor time. And reading ahead from a disk, which caches, only copies.
LEAN = ("--ignore-checksum", "--buffer-size", "0")


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST:PORT. Raises UsageError."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(
                "syncd bridge",
                path=text,
                why="it is no address to listen at",
                hint="E.g. --address 127.0.0.1:8766.",
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def from_here(self) -> Address:
        """Return where this machine's own programs reach it."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    @property
    def url(self) -> str:
        """Where this machine's own programs reach it, as a URL."""
        return f"http://{self.from_here()}"

    def is_private(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


class BridgeServer(Child):
    """The server of one shared folder. `realm` is what it calls itself; no other server does."""

    name = "bridge"
    foreign = ("RCLONE_",)

    def __init__(
        self,
        folder: Path,
        *,
        objects: Path,
        serve: Path,
        bootstrap: Path,
        address: Address,
        password: str,
    ) -> None:
        super().__init__(folder)
        self.realm = f"syncd-{secrets.token_hex(8)}"
        self.address = address
        self._mounts = {OBJECTS: objects, SERVE: serve, BOOTSTRAP: bootstrap}
        self._password = password
        self._absent = secrets.token_hex(16)  # a name that no object has

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises BusyError when the folder has a bridge already, or its port is taken; RemoteError
        when rclone is missing or does not start.
        """
        self._binary = find_rclone()
        try:
            super().start()
        except BusyError as error:
            hint = "`syncd bridge --show` prints what to paste at a worker; or stop it first."
            raise BusyError(_WHAT, path=error.path, why=error.why, hint=hint) from error
        if self.working(self.start_seconds + STOP_SECONDS):
            return
        self.close()
        if any(text in self.failure for text in _TAKEN):
            raise BusyError(
                _WHAT,
                path=self.address.url,
                why="another program listens there",
                hint="Stop that one, or give another --address.",
            )
        raise RemoteError(_WHAT, path=self.address.url, why=self.failure or "it did not answer")

    def prepare(self) -> None:
        empty = self.folder / "empty"
        for folder in (*self._mounts.values(), empty):
            make_dirs(folder)
        text, parts = "", [_quoted(f"{OBJECTS}={self._mounts[OBJECTS]}")]
        for name in (SERVE, BOOTSTRAP):
            read_only = f"{_quoted(f'{self._mounts[name]}:ro')} {_quoted(f'{empty}:ro')}"
            text += f"[{name}]\ntype = union\nupstreams = {read_only}\n\n"
            parts.append(f"{name}={name}:")
        text += f"[bridge]\ntype = combine\nupstreams = {' '.join(parts)}\n"
        publish_bytes(self.folder / "rclone.conf", text.encode("utf-8"), mode=0o600)

    def command(self) -> list[str]:
        command = [str(self._binary), "serve", "webdav", "bridge:", "--addr", str(self.address)]
        command += ["--config", str(self.folder / "rclone.conf"), "--realm", self.realm]
        command += ["--log-level", "NOTICE", "--ask-password=false", "--vfs-cache-mode", "off"]
        # How long a change on the disk may go unseen. Of a folder that is being listed, rclone asks
        # for each file alone, and reads the folder again for it when this is over: with 1 ms 300
        # files take four times as long as with 20. With 0 it keeps a core busy for ever.
        return [*command, "--dir-cache-time", "20ms", "--poll-interval", "0", *LEAN]

    def environ(self) -> Mapping[str, str]:
        return {"RCLONE_USER": USER, "RCLONE_PASS": self._password}

    def answers(self, timeout: float) -> bool:
        """Whether this very server answers, asks for its password, and has no folder locked."""
        if self._status("PROPFIND", "/", {"Depth": "0"}, timeout) != 401:
            return False
        login = base64.b64encode(f"{USER}:{self._password}".encode()).decode("ascii")
        headers = {"Authorization": f"Basic {login}", "Depth": "0"}
        if self._status("PROPFIND", "/", headers, timeout) != 207:
            return False
        return all(self._status("DELETE", at, headers, timeout) != 423 for at in self._nothing())

    def _nothing(self) -> Iterator[str]:
        """Yield a path in each folder of the objects at which there is nothing.

        Who has the password can LOCK a folder for ever, and only a lock's maker can end it. To
        delete what is not there changes nothing, and is refused in a locked folder before rclone
        looks whether it is there; one that is started again knows of no lock.
        """
        folders: list[str] = []
        with contextlib.suppress(OSError):  # someone took them away
            folders = [each.name for each in os.scandir(self._mounts[OBJECTS]) if each.is_dir()]
        for folder in (f"/{OBJECTS}", *(f"/{OBJECTS}/{quote(name)}" for name in folders)):
            yield f"{folder}/{self._absent}"

    def _status(self, method: str, path: str, headers: Mapping[str, str], timeout: float) -> int:
        """Return the answer's code, or 0 when there is none, or none of ours."""
        at = self.address.from_here()
        connection = http.client.HTTPConnection(at.host, at.port, timeout=timeout)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, headers=dict(headers))
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0


def _quoted(text: str) -> str:
    """Return an item of a list in rclone's configuration, where blanks separate items."""
    return '"' + text.replace('"', '""') + '"'
