"""The bridge as a whole: server, tunnel, and the URL at which a worker reaches them.

    with Bridge(layout, objects, address=..., told=print):
        ...

Runs beside whatever its owner does, in threads of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.errors import ConfigError, RemoteError, UsageError
from protocol.paths import Layout
from protocol.publish import publish_bytes
from protocol.wire import Role
from syncd.bridge import OBJECTS, bridge_folder, objects_folder, url_file
from syncd.bridge.cloudflared import NamedTunnel, QuickTunnel
from syncd.bridge.program import ProgramTunnel, asks_for
from syncd.bridge.server import Address, BridgeServer
from syncd.bridge.ssh import SshTunnel
from syncd.bridge.tunnel import Tunnel, TunnelProcess
from syncd.config import Settings, make_private
from syncd.rclone.address import parse_address
from syncd.rclone.endpoint import private_folder
from syncd.rclone.errors import shown

LOOK_SECONDS = 1.0
PROBE_SECONDS = 15.0  # between looks at whether the server answers
ANSWER_SECONDS = 10.0  # that it has for that

log = logging.getLogger("syncd")


class Bridge:
    """The bridge of one shared folder; one at a time runs on it.

    `told` is called with the URL at which the bridge is reached, in another thread: once it is
    known, and whenever it is another one.
    """

    def __init__(
        self,
        layout: Layout,
        objects: Path,
        *,
        address: Address,
        told: Callable[[str], None],
        tunnel: str = "",
        url: str = "",
    ) -> None:
        """`tunnel` is as in `syncd.bridge.tunnel`; `url` is where a worker reaches the bridge, for
        what cannot tell. Raises UsageError."""
        self._layout = layout
        self._folder = bridge_folder(layout)
        self._address = address
        self._told = told
        self._given_url = _checked_url(url)
        self._known = ""
        self._closing = threading.Event()
        self._changing = threading.Lock()
        make_private(layout)
        private_folder(self._folder)
        self.password_file = self._folder / "password"
        self.password = _kept_password(self.password_file)
        self.server = BridgeServer(
            self._folder,
            objects=objects,
            serve=layout.serve,
            address=address,
            password=self.password,
        )
        self._tunnel = self._parse_tunnel(tunnel) if tunnel else None
        self.tunnel = self._tunnel and TunnelProcess(self._folder, self._tunnel, self._found)
        self._thread = threading.Thread(target=self._look_after, name="bridge", daemon=True)

    def start(self) -> None:
        """Start everything; returns when the server answers, which may be before the tunnel does.

        Raises BusyError when a bridge runs on this folder or the port is taken, RemoteError when
        rclone does not start, UsageError when the tunnel's program is missing.
        """
        if self._tunnel:
            self._tunnel.check()
        self.server.start()
        try:
            url_file(self._layout).unlink(missing_ok=True)
            if self.tunnel:
                self.tunnel.start()
            else:
                self._found(self._given_url or self._address.url)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End everything. Safe to call twice."""
        self._closing.set()
        if self.tunnel:
            self.tunnel.close()
        with self._changing:
            if self._known:  # it is ours
                url_file(self._layout).unlink(missing_ok=True)
        self.server.close()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check(self) -> None:
        """Raise RemoteError when the server cannot be kept running any more."""
        if self.server.closed:
            raise RemoteError("run the bridge", path=self._address.url, why=self.server.failure)

    def advice(self) -> str:
        """Return what a person has to do so that a worker reaches the URL, or ""."""
        return self._tunnel.advice() if self._tunnel else ""

    def _parse_tunnel(self, text: str) -> Tunnel:
        kind, _, rest = text.partition(":")
        target = self._address.from_here()
        if kind == "cloudflared":
            if rest:
                return NamedTunnel(target.url, rest, self._given_url)
            return QuickTunnel(target.url, self._folder)
        if kind == "ssh":
            port, proxy = target.port, self._given_url
            return SshTunnel.parse(rest, target=str(target), port=port, proxy=proxy)
        if kind == "command":
            leads_here = lambda url: asks_for(self.server.realm, url)  # noqa: E731
            return ProgramTunnel(
                rest, address=str(target), proxy=self._given_url, leads_here=leads_here
            )
        raise UsageError(
            "start the tunnel",
            path=text,
            why="there is no such kind of tunnel",
            hint="cloudflared, cloudflared:NAME, ssh:user@host or command:'...'.",
        )

    def _found(self, url: str) -> None:
        """Publish and tell a URL, when it is news."""
        with self._changing:
            if url == self._known or self._closing.is_set():
                return
            self._known = url
            publish_bytes(url_file(self._layout), f"{url}/{OBJECTS}\n".encode(), mode=0o600)
        self._told(url)

    def _look_after(self) -> None:
        """Have the server started again when it hangs, and hear of a tunnel's new URL."""
        since = 0.0
        while not self._closing.wait(LOOK_SECONDS):
            if self.tunnel and self.tunnel.pid is not None:
                self.tunnel.look()
            since += LOOK_SECONDS
            if since >= PROBE_SECONDS and (process := self.server.working(0)):
                since = 0.0
                self.server.kill_if_silent(process, ANSWER_SECONDS)


def served_objects(layout: Layout, settings: Settings) -> Path:
    """Return the folder of this machine that is the controller's remote. Raises ConfigError."""
    why = hint = ""
    remote = settings.remote
    if settings.role is not Role.CONTROLLER:
        why, hint = "this end is the worker's", "The bridge runs at the controller's end."
    elif not os.path.isabs(remote):
        why = f"its remote is {shown(remote)}, and a bridge serves a folder of this machine"
        hint = "Make an end for it in another folder: `syncd init --role controller --bridge`."
    elif layout.root.resolve().is_relative_to(Path(remote).resolve()):
        why = f"its remote, {remote}, holds the whole shared folder, the key too"
        hint = f"Choose another folder, such as {objects_folder(layout)}."
    if why:
        raise ConfigError("start the bridge", path=layout.settings, why=why, hint=hint)
    return Path(remote)


def _checked_url(url: str) -> str:
    """Check a URL that a person gave, by the rules for a worker's. Raises ConfigError."""
    if not url:
        return ""
    scheme, separator, rest = url.rstrip("/").partition("://")
    return parse_address(f"{scheme}{separator}user:password@{rest}").url


def _kept_password(path: Path) -> str:
    """Return the bridge's password, made once: the workers' settings hold it."""
    try:
        password = path.read_text("ascii").strip()
    except FileNotFoundError:
        password = ""
    if not password:
        password = secrets.token_urlsafe(24)
        publish_bytes(path, f"{password}\n".encode("ascii"), mode=0o600)
    return password
