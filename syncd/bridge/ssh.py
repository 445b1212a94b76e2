"""A tunnel by OpenSSH: a port of another host's loopback leads to the bridge.

The port is opened on the loopback there, so that nothing travels unencrypted: what leads on is a
proxy with a certificate, or the worker's own `ssh -L`.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field

from protocol.errors import UsageError

_TARGET = re.compile(r"(?P<host>[^\s:/-][^\s:/]*)(:(?P<port>\d+))?")
_OPTIONS = (
    # One that cannot open its port, or whose other end is gone, is to end, and be started anew.
    *("ExitOnForwardFailure=yes", "ServerAliveInterval=15", "ServerAliveCountMax=3"),
    # There is nobody to ask for a password, or whether a host is the right one.
    *("BatchMode=yes", "ConnectTimeout=15"),
)
# What ssh says at level DEBUG1 once the far side has opened the port.
_OPENED = "remote forward success"


@dataclass
class SshTunnel:
    """`ssh -R` to `host`, which may be any name of the user's ~/.ssh/config. `url` leads there."""

    host: str
    port: int
    target: str  # host:port of the bridge
    proxy: str = ""  # the URL that leads to that port, when there is one
    fixed: bool = field(default=True, init=False)
    _opened: bool = field(default=False, init=False)

    @classmethod
    def parse(cls, text: str, *, target: str, port: int, proxy: str) -> SshTunnel:
        """Read USER@HOST[:PORT]; `port` is the default. Raises UsageError."""
        found = _TARGET.fullmatch(text)
        far = int(found["port"] or port) if found else 0
        if not found or not 0 < far < 65536:
            raise UsageError(
                "start the tunnel",
                path=f"ssh:{text}",
                why="it is not ssh:user@host or ssh:user@host:port",
                hint="The port is the one to open there; one of sshd's goes into ~/.ssh/config.",
            )
        return cls(found["host"], far, target, proxy)

    def check(self) -> None:
        if shutil.which("ssh") is None:
            raise UsageError("start the tunnel", why="there is no ssh on the PATH")

    def command(self) -> list[str]:
        options = [word for option in _OPTIONS for word in ("-o", option)]
        forward = f"127.0.0.1:{self.port}:{self.target}"
        return ["ssh", "-N", "-T", "-v", *options, "-R", forward, "--", self.host]

    def begin(self) -> None:
        self._opened = False

    def heard(self, line: str) -> bool:
        self._opened |= _OPENED in line
        return True

    def reason(self, line: str) -> str:
        return "" if line.startswith(("debug1:", "Transferred: ", "Bytes per second: ")) else line

    def url(self) -> str | None:
        return (self.proxy or f"http://127.0.0.1:{self.port}") if self._opened else None

    def advice(self) -> str:
        if self.proxy:
            return ""
        forward = f"{self.port}:127.0.0.1:{self.port}"
        return (
            f"The port is open on {self.host}'s loopback alone. At the worker, first:\n"
            f"  ssh -f -N -o ExitOnForwardFailure=yes -L {forward} {self.host}\n"
            f"or lead https://... to 127.0.0.1:{self.port} there (`caddy reverse-proxy --from HOST "
            f"--to 127.0.0.1:{self.port}`), and give that URL here with --url."
        )
