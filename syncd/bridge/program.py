"""A tunnel by any program that prints a URL.

Programs print other URLs as well (of their terms, of their advertisers), so one counts when it
leads here: when who asks there without a password is turned away in the name of our own server.
"""

from __future__ import annotations

import http.client
import re
import shlex
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from protocol.errors import UsageError
from syncd.rclone.address import is_loopback

_URL = re.compile(r"https?://[^\s\"'<>\\|,;()\[\]{}]+", re.IGNORECASE)
LOOK_SECONDS = 1.0
# A tunnel's name is often known before it leads anywhere.
TRY_SECONDS = 60.0
_MOST = 5


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
        self._address = address
        self._leads_here = leads_here
        self._lock = threading.Lock()
        self._printed: dict[str, float] = {}  # URLs, the newest last; until when to try them
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
        until = time.monotonic() + TRY_SECONDS
        with self._lock:
            for found in _URL.findall(line):
                url = found.rstrip(".:!?/")
                if self._address not in url and is_usable(url):
                    self._printed[url] = until
        return True

    def reason(self, line: str) -> str:
        return line

    def url(self) -> str | None:
        if self._proxy:
            return self._proxy
        with self._lock:
            now = time.monotonic()
            self._printed = {url: end for url, end in self._printed.items() if end > now}
            candidates = list(self._printed)[-_MOST:]
        for url in reversed(candidates):
            if self._leads_here(url):
                with self._lock:
                    self._url = url
                    for tried in candidates[: candidates.index(url) + 1]:
                        self._printed.pop(tried, None)
                break
        return self._url or None

    def advice(self) -> str:
        return ""


def is_usable(url: str) -> bool:
    """Whether a worker takes a URL: over http:// only one of its own machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme.lower() == "https" or is_loopback(parts.hostname or "")


def asks_for(realm: str, url: str) -> bool:
    """Whether a server at `url` turns us away in the name of `realm`."""
    try:
        with urllib.request.urlopen(url, timeout=LOOK_SECONDS):
            return False
    except urllib.error.HTTPError as error:
        with error:
            asked = error.headers.get("WWW-Authenticate") or ""
            return error.code == 401 and f'realm="{realm}"' in asked
    except (OSError, ValueError, http.client.HTTPException):
        return False
