"""A tunnel by any program that prints a URL.

Programs print other URLs as well (of their terms, of their advertisers), so one counts when it
leads here: when who asks there without a password is turned away in the name of our own server.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import shlex
import shutil
import socket
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from protocol.errors import UsageError
from syncd.rclone.address import is_loopback

_URL = re.compile(r"https?://[^\s\"'<>\\|,;()\[\]{}]+", re.IGNORECASE)
_SCHEME = re.compile(r"^\w+://")
LOOK_SECONDS = 1.0  # for one URL, whatever its server does
_HEAD_BYTES = 16 * 1024  # of an answer
# A tunnel's name is often known before it leads anywhere. So each URL is tried again, after pauses
# that double, for about twice as long as the longest.
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 32.0
_MOST = 200
_LONGEST = 2000


@dataclass
class _Printed:
    """A URL that was printed: when to look where it leads, and the pause after that."""

    due: float
    pause: float = _FIRST_PAUSE


class ProgramTunnel:
    """The program of a command line, in which `{port}` and `{address}` stand for the bridge's.

    The newest URL that it printed and that `leads_here` counts; with `proxy`, that one does, and
    nothing need be printed.
    """

    def __init__(
        self, command: str, *, address: str, proxy: str, leads_here: Callable[[str], bool]
    ) -> None:
        port = address.rpartition(":")[2]
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError("start the tunnel", path=command, why=str(error)) from error
        if not words:
            raise UsageError("start the tunnel", why="the command is empty")
        self._command = [
            word.replace("{port}", port).replace("{address}", address) for word in words
        ]
        self._proxy = proxy
        self.fixed = bool(proxy)
        self._address = address
        self._leads_here = leads_here
        self._lock = threading.Lock()
        self._printed: dict[str, _Printed] = {}  # those not known to lead here, the newest last
        self._url = ""

    def check(self) -> None:
        if shutil.which(self._command[0]) is None:
            raise UsageError(
                "start the tunnel", path=self._command[0], why="there is no such program"
            )

    def command(self) -> list[str]:
        return self._command

    def begin(self) -> None:
        with self._lock:
            self._printed, self._url = {}, ""

    def heard(self, line: str) -> bool:
        found = (url.rstrip(".:!?/") for url in _URL.findall(line))
        usable = [url for url in found if self._address not in url and is_usable(url)]
        with self._lock:
            for url in usable:
                self._note(url)
        return True

    def _note(self, url: str) -> None:
        """Have a URL looked at soon: its turn comes at once, if it is news."""
        # Of what lies below the one that counts, as a program that logs requests prints, each
        # would seem to lead here.
        if url == self._url or (self._url and url.startswith(f"{self._url}/")):
            return
        before = self._printed.pop(url, None)
        pause = before.pause if before else _FIRST_PAUSE
        self._printed[url] = _Printed(time.monotonic(), pause)
        if len(self._printed) > _MOST:  # the oldest of those that were tried most often goes
            del self._printed[max(self._printed, key=lambda each: self._printed[each].pause)]

    def reason(self, line: str) -> str:
        return line

    def url(self) -> str | None:
        if self._proxy:
            return self._proxy
        until = time.monotonic() + LOOK_SECONDS
        while (due := self._due()) and time.monotonic() < until:
            for url in due:
                self._try(url)
        return self._url or None

    def _due(self) -> list[str]:
        """Return whose turn it is: the newest, and the one that has waited longest."""
        now = time.monotonic()
        with self._lock:
            due = [url for url, each in self._printed.items() if each.due <= now]
            waited = sorted(due, key=lambda url: self._printed[url].due)
        return [due[-1], *(url for url in waited[:1] if url != due[-1])] if due else []

    def _try(self, url: str) -> None:
        leads_here = self._leads_here(url)
        with self._lock:
            tried = self._printed.get(url)
            if tried is None:  # another process has been started meanwhile
                return
            if leads_here:
                self._url = url
                older = list(self._printed)
                for each in older[: older.index(url) + 1]:
                    del self._printed[each]
            elif tried.pause > _LONGEST_PAUSE:
                del self._printed[url]
            else:
                tried.due = time.monotonic() + tried.pause
                tried.pause *= 2

    def advice(self) -> str:
        return ""


def is_usable(url: str) -> bool:
    """Whether a worker takes a URL: over http:// only one of its own machine."""
    if len(url) > _LONGEST:
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    host = parts.hostname or ""
    return is_loopback(host) or (parts.scheme.lower() == "https" and host != "")


def asks_for(realm: str, url: str) -> bool:
    """Whether a server at `url` turns us away in the name of `realm`, within LOOK_SECONDS.

    No redirect is followed: where it leads, a worker's requests would not be led.
    """
    deadline = time.monotonic() + LOOK_SECONDS
    try:
        with contextlib.closing(_connection(url)) as connection:
            connection.request("GET", urlsplit(url).path or "/", headers={"Connection": "close"})
            status, _, rest = _head(connection.sock, deadline).partition(b"\r\n")
        asked = http.client.parse_headers(io.BytesIO(rest)).get_all("WWW-Authenticate", [])
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return status.split()[1:2] == [b"401"] and any(f'realm="{realm}"' in each for each in asked)


def _head(sock: socket.socket, deadline: float) -> bytes:
    """Return as much of an answer's head as has come by `deadline`, and of _HEAD_BYTES."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock.settimeout(left)
        part = sock.recv(_HEAD_BYTES)
        if not part:
            break
        head += part
    return head


def _connection(url: str) -> http.client.HTTPConnection:
    """Return a connection to a URL's host, not yet made: by the system's proxy, if it has one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme.lower() == "http":  # of this machine, where no proxy leads
        return http.client.HTTPConnection(host, parts.port, timeout=LOOK_SECONDS)
    proxy = urllib.request.getproxies().get("https", "")
    if not proxy or urllib.request.proxy_bypass(host):
        return http.client.HTTPSConnection(host, parts.port, timeout=LOOK_SECONDS)
    at = urlsplit(proxy if _SCHEME.match(proxy) else f"http://{proxy}")
    login = f"{unquote(at.username or '')}:{unquote(at.password or '')}".encode()
    token = {"Proxy-Authorization": f"Basic {b64encode(login).decode()}"} if at.username else {}
    connection = http.client.HTTPSConnection(at.hostname or "", at.port, timeout=LOOK_SECONDS)
    connection.set_tunnel(host, parts.port, token)
    return connection
