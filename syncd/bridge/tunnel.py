"""Tunnels: programs that make a port of this machine reachable from elsewhere, kept running.

--tunnel cloudflared            a quick tunnel, whose URL is another one after each start
--tunnel cloudflared:NAME       a tunnel of the user's Cloudflare account
--tunnel ssh:user@host[:port]   a port of that host's own loopback leads here
--tunnel command:'...'          any program that prints a URL
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from syncd.child import Child


class Tunnel(Protocol):
    """One kind of tunnel: what to run, and what its output says."""

    @property
    def fixed(self) -> bool:
        """Whether its URL is the same after each start."""

    def check(self) -> None:
        """Raise UsageError when it cannot be run on this machine at all."""

    def command(self) -> list[str]:
        """Return the command line."""

    def begin(self) -> None:
        """Forget what the process before said: a new one is about to be started."""

    def heard(self, line: str) -> bool:
        """Take a line that it printed; return False when it is of no use any more."""

    def reason(self, line: str) -> str:
        """Return what to say if it ends after this line; "" for one that tells nothing of that."""

    def url(self) -> str | None:
        """Return the URL that leads here now, or None as long as none does."""

    def advice(self) -> str:
        """Return what a person has to do so that a worker reaches the URL, or ""."""


class TunnelProcess(Child):
    """A tunnel that is kept running. `told` is called, in other threads, with each new URL."""

    name = "tunnel"
    start_seconds = 60.0
    first_pause = 1.0
    most_pause = 120.0  # Cloudflare bars who asks for quick tunnels too often
    gives_up = False

    def __init__(self, folder: Path, tunnel: Tunnel, told: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._tunnel = tunnel
        self._told = told

    def command(self) -> list[str]:
        return self._tunnel.command()

    def prepare(self) -> None:
        self._tunnel.begin()

    def heard(self, line: str) -> bool:
        return self._tunnel.heard(line)

    def reason(self, line: str) -> str:
        return self._tunnel.reason(line)

    def answers(self, timeout: float) -> bool:
        return self._tunnel.url() is not None

    def changed(self, works: bool) -> None:
        if works:
            self.look()

    def look(self) -> None:
        """Tell the URL when it has changed, which it may without a restart."""
        url = self._tunnel.url()
        if url is not None:
            self._told(url)
