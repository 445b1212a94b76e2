"""The bridge as a whole: server, tunnel, and the URL at which a worker reaches them.

    with Bridge(layout, objects, address=..., told=print):
        ...

Runs beside whatever its owner does, in threads of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.errors import ConfigError, DataError, RemoteError, UsageError, UserError
from protocol.paths import Layout
from protocol.publish import publish_bytes
from protocol.wire import Role
from syncd.bridge import (
    OBJECTS,
    bootstrap_folder,
    bridge_folder,
    current_url,
    objects_folder,
    password_file,
    read_password,
    url_file,
)
from syncd.bridge.cloudflared import NamedTunnel, QuickTunnel
from syncd.bridge.program import ProgramTunnel, asks_for
from syncd.bridge.running import Record, read_record
from syncd.bridge.server import Address, BridgeServer
from syncd.bridge.ssh import SshTunnel
from syncd.bridge.tunnel import Tunnel, TunnelProcess
from syncd.child import LOST, STOP_SECONDS
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
        self._url = ""  # where a worker reaches it now
        self._said = ""  # the one that was told last
        self._untold = ""  # why it could not be published or told, at the last look
        self._fault: Exception | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        make_private(layout)
        private_folder(self._folder)
        self.password_file = password_file(layout)
        self.password = _kept_password(layout)
        self.server = BridgeServer(
            self._folder,
            objects=objects,
            serve=layout.serve,
            bootstrap=bootstrap_folder(layout),
            address=address,
            password=self.password,
        )
        self._tunnel = self._parse_tunnel(tunnel) if tunnel else None
        self._record = Record(
            address=address.url, tunnel=tunnel, fixed=self._tunnel is None or self._tunnel.fixed
        )
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
            with contextlib.suppress(IsADirectoryError, PermissionError):  # told with the URL
                url_file(self._layout).unlink(missing_ok=True)
            self._note_start()
            if self.tunnel:
                self.tunnel.start()
            else:
                self._url = self._given_url or self._address.url
                self._announce()
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End everything, whatever hangs. Safe to call twice."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self._end()

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
        """Raise RemoteError when the server cannot be kept running any more, DataError when the
        bridge's folder is not where it was."""
        if self._fault:
            raise self._fault
        if self.server.is_lost():
            raise DataError(
                "run the bridge",
                path=self._folder,
                why=LOST,
                hint="Start the bridge again where the folder is now.",
            )
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

    def _end(self) -> None:
        if self.tunnel:
            self.tunnel.close()
        url = current_url(self._layout)
        if url and url == _objects(self._url) and not self.server.is_lost():
            url_file(self._layout).unlink(missing_ok=True)
        self.server.close()

    def _found(self, url: str) -> None:
        if url != self._url:
            self._url = url
            self._wake.set()

    def _announce(self) -> None:
        """Publish the URL and tell it, when it is news; what fails is tried at the next look."""
        if not self._url:
            return
        why = "; ".join(filter(None, map(_failure, (self._publish, self._tell))))
        if why and why != self._untold:
            log.warning("the bridge's URL cannot be told everywhere, and will be: %s", why)
        self._untold = why

    def _publish(self) -> None:
        url = self._url
        if self._closing.is_set() or current_url(self._layout) == _objects(url):
            return
        self._note_url(url)
        publish_bytes(url_file(self._layout), f"{_objects(url)}\n".encode(), mode=0o600)

    def _tell(self) -> None:
        url = self._url
        if url != self._said:
            self._told(url)
            self._said = url

    def _note_start(self) -> None:
        """Note that it runs, and which URL was told by the one before."""
        with contextlib.suppress(DataError):  # a damaged note is written anew
            if before := read_record(self._layout):
                self._record = replace(self._record, url=before.url, changed=before.changed)
        self._record.save(self._layout)

    def _note_url(self, url: str) -> None:
        before = self._record.url
        changed = time.time() if before not in ("", url) else self._record.changed
        self._record = replace(self._record, url=url, changed=changed, advice=self.advice())
        self._record.save(self._layout)

    def _look_after(self) -> None:
        """Look after everything until it is closed or cannot go on, which `check` tells."""
        try:
            due = time.monotonic() + PROBE_SECONDS
            while not self._pause():
                self._look()
                if time.monotonic() >= due and (process := self.server.working(0)):
                    self.server.kill_if_silent(process, ANSWER_SECONDS)
                    due = time.monotonic() + PROBE_SECONDS
                self.check()
        except UserError as error:
            self._fault = error
            log.error("%s", error)
            self._end()
        except Exception as error:
            self._fault = error
            log.exception("a fault in what looks after the bridge")
            self._end()

    def _pause(self) -> bool:
        """Wait until there is something to be done; return whether that is to end."""
        self._wake.wait(LOOK_SECONDS)
        self._wake.clear()
        return self._closing.is_set()

    def _look(self) -> None:
        """Hear of a tunnel's new URL, and tell where a worker reaches the bridge."""
        if self.tunnel and self.tunnel.pid is not None:
            self.tunnel.look()
        if not self.server.is_lost():
            self._announce()


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


def _kept_password(layout: Layout) -> str:
    """Return the bridge's password, made once: the workers' settings hold it."""
    password = read_password(layout)
    if password is None:
        password = secrets.token_urlsafe(24)
        publish_bytes(password_file(layout), f"{password}\n".encode("ascii"), mode=0o600)
    return password


def _objects(url: str) -> str:
    return f"{url}/{OBJECTS}"


def _failure(step: Callable[[], None]) -> str:
    """Return why a step failed, "" when it did not."""
    try:
        step()
    except OSError as error:
        place = error.filename2 or error.filename or "the output"  # a rename's target, if it is one
        return f"{place}: {error.strerror or error}"
    except UserError as error:
        return str(error)
    return ""
