"""A remote that is named by its URL alone: `https://user:password@host/objects`.

So a worker needs no configuration of rclone's for what `syncd bridge` serves. The password goes to
rclone in a request's body, in the form that it wants, and to no command line.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from protocol.errors import ConfigError
from syncd.rclone.errors import shown

_WHAT = "read the remote's address"
_URL = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """A WebDAV folder: its `url`, without credentials or a slash at the end, and who may enter."""

    url: str
    user: str
    password: str = field(repr=False)

    def text(self) -> str:
        """Return it as one URL, credentials and all."""
        scheme, host, path, *_ = urlsplit(self.url)
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return urlunsplit((scheme, f"{login}@{host}", path, "", ""))

    def connection_string(self, obscured: str) -> str:
        """Return what rclone calls it, given the password as rclone's `obscure` writes it."""
        options = {
            "url": self.url,
            # Asks for no more than the server tells: a fifth fewer bytes in small things.
            "vendor": "rclone",
            "user": self.user,
            "pass": obscured,
            # By default rclone waits 10 ms between two calls; ours wait for each other anyway.
            "pacer_min_sleep": "0",
        }
        listed = ",".join(f"{key}={_quoted(value)}" for key, value in options.items())
        return f":webdav,{listed}:"


def is_address(remote: str) -> bool:
    """Whether a remote's name is a URL."""
    return _URL.match(remote) is not None


def parse_address(remote: str) -> Address:
    """Read a remote's URL. Raises ConfigError, which does not repeat its password."""
    problem = hint = ""
    try:
        parts = urlsplit(remote)
        port = f":{parts.port}" if parts.port else ""
    except ValueError as error:
        raise ConfigError(_WHAT, path=shown(remote), why=str(error), hint=_PASTE) from None
    host = parts.hostname or ""
    if not is_address(remote) or not host or parts.query or parts.fragment:
        problem, hint = "it is not a URL of a folder", _PASTE
    elif not (parts.username and parts.password):
        problem, hint = "it has no user and password", _PASTE
    elif parts.scheme == "http" and not is_loopback(host):
        problem, hint = "http:// would send the password, and all else, unencrypted", _ENCRYPT
    if problem:
        raise ConfigError(_WHAT, path=shown(remote), why=problem, hint=hint)
    netloc = f"[{host}]{port}" if ":" in host else f"{host}{port}"
    url = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
    return Address(url, unquote(parts.username or ""), unquote(parts.password or ""))


_PASTE = "Paste the whole of what `syncd bridge` prints, https://user:password@host/objects."
_ENCRYPT = (
    "Use https://, as a tunnel or a proxy gives it; or forward a port of this machine to it by "
    "`ssh -L`, and use http://127.0.0.1:PORT. In a network that encrypts by itself, make a remote "
    "of type webdav with `rclone config`."
)


def is_loopback(host: str) -> bool:
    """Whether a host's name or number is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def _quoted(value: str) -> str:
    """Return a value of a connection string, in which a quote is doubled."""
    return "'" + value.replace("'", "''") + "'"
