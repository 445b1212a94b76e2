"""Cloudflare's tunnels, by the user's own `cloudflared`.

What it prints was read in its source (cmd/cloudflared/tunnel/quick_tunnel.go, metrics/,
connection/; 2021 to 2026) and in its users' reports. A line is text (`... INF message
field=value`) or, with `--output json`, an object; the patterns fit both.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
from pathlib import Path

from protocol.errors import UsageError
from protocol.publish import publish_bytes

_INSTALL = (
    "Install it from https://developers.cloudflare.com/cloudflare-one/connections/"
    "connect-networks/downloads/, or choose another --tunnel."
)
_QUICK_URL = re.compile(r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com", re.IGNORECASE)
_METRICS = re.compile(r"Starting metrics server on ([0-9a-zA-Z.:\[\]-]+:\d+)/metrics")
# "Registered tunnel connection" since 2022; before that "Connection 5e91… registered".
_CONNECTED = re.compile(r"Registered tunnel connection|Connection \S+ registered")
# It asks again for ever with a quick tunnel that Cloudflare has dropped, as it does those of a
# laptop that slept for long. A new process gets a new one.
_DROPPED = re.compile(r"Unauthorized: (Tunnel not found|Failed to get tunnel)")
METRICS_SECONDS = 1.0


class _Cloudflared:
    """What quick and named tunnels have in common: the program, its log, its metrics."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._metrics = ""
        self._connected = False

    def check(self) -> None:
        if shutil.which("cloudflared") is None:
            raise UsageError(
                "start the tunnel", why="there is no cloudflared on the PATH", hint=_INSTALL
            )

    def begin(self) -> None:
        self._metrics, self._connected = "", False

    def heard(self, line: str) -> bool:
        if found := _METRICS.search(line):
            self._metrics = found[1]
        if _CONNECTED.search(line):
            self._connected = True
        return True

    def reason(self, line: str) -> str:
        # Its last line tells of an answer that it could not read; the line before has the reason.
        if "429 Too Many Requests" in line:
            return "Cloudflare has given too many quick tunnels to this network: 429"
        return "" if line.startswith("failed to unmarshal quick Tunnel") else line

    def advice(self) -> str:
        return ""

    def is_connected(self) -> bool:
        """Whether Cloudflare leads what it gets to us: the log has said so, or /ready does."""
        return self._connected or self._ask("/ready").get("status") == 200

    def _ask(self, path: str) -> dict[str, object]:
        """Return what its metrics server answers, as JSON; empty when it does not."""
        if not self._metrics:
            return {}
        connection = http.client.HTTPConnection(self._metrics, timeout=METRICS_SECONDS)
        try:
            connection.request("GET", path)
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return answer if isinstance(answer, dict) else {}


class QuickTunnel(_Cloudflared):
    """A tunnel without an account: another URL after each start, and no promise of Cloudflare's.

    `folder` gets an empty configuration: the rules of the user's own one would answer in our place.
    """

    fixed = False

    def __init__(self, target: str, folder: Path) -> None:
        super().__init__(target)
        self._config = folder / "cloudflared.yml"
        self._url = ""

    def begin(self) -> None:
        super().begin()
        self._url = ""

    def command(self) -> list[str]:
        publish_bytes(self._config, b"# Empty: see the bridge's documentation.\n")
        command = ["cloudflared", "tunnel", "--config", str(self._config), "--no-autoupdate"]
        # The level, since what is asked for here is said at "info".
        return [*command, "--loglevel", "info", "--metrics", "127.0.0.1:0", "--url", self._target]

    def heard(self, line: str) -> bool:
        super().heard(line)
        if found := _QUICK_URL.search(line):
            self._url = found[0].lower()
        # Before it was ever connected, that can be a Cloudflare that does not know it yet.
        return not (self._connected and _DROPPED.search(line))

    def url(self) -> str | None:
        if not self._url:
            # Its metrics server knows the name too, whatever the log looks like.
            host = str(self._ask("/quicktunnel").get("hostname") or "")
            self._url = f"https://{host.removeprefix('https://')}" if host else ""
        return self._url if self._url and self.is_connected() else None


class NamedTunnel(_Cloudflared):
    """A tunnel of the user's own account and configuration, whose hostname they know."""

    fixed = True

    def __init__(self, target: str, name: str, url: str) -> None:
        super().__init__(target)
        self._name = name
        self._url = url

    def check(self) -> None:
        super().check()
        if not self._url:
            raise UsageError(
                "start the tunnel",
                path=f"cloudflared:{self._name}",
                why="its hostname is not known here",
                hint="Give it with --url https://HOSTNAME.",
            )

    def command(self) -> list[str]:
        command = ["cloudflared", "tunnel", "--no-autoupdate", "--loglevel", "info"]
        command += ["--metrics", "127.0.0.1:0", "run"]
        # Rules in the user's configuration go before the URL.
        return [*command, "--url", self._target, self._name]

    def url(self) -> str | None:
        return self._url if self.is_connected() else None
