"""Administration of rclone's remotes, through rclone-python: list, create, about, version.

rclone-python pastes its arguments into a shell's command line, so nothing reaches it here but
names and values of characters that no shell knows. Transfers go through `syncd.rclone.rcd`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from rclone_python import rclone as rclone_python
from rclone_python.utils import RcloneException

from protocol.errors import RemoteError, UsageError
from syncd.rclone.binary import find_rclone
from syncd.rclone.errors import from_answer

# It prints to the terminal on its own, for one that a remote has no OAuth client.
logging.getLogger("rclone_python").setLevel(logging.ERROR)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
# No quote, blank at an end, `$`, backquote, backslash, `!`, `%`, `;`, `&`, `|`, `<`, `>`, line end.
_VALUE = re.compile(r"[A-Za-z0-9_./:@+=,~-]([A-Za-z0-9_./:@+=,~ -]*[A-Za-z0-9_./:@+=,~-])?")
_SECRET = re.compile(r"pass|secret|token|(^|_)key|credential|private")

# rclone-python has no time-outs of its own, and its child could ask the terminal for a password.
_LIMITS = {
    "RCLONE_CONTIMEOUT": "10s",
    "RCLONE_TIMEOUT": "30s",
    "RCLONE_LOW_LEVEL_RETRIES": "2",
    "RCLONE_RETRIES": "1",
    "RCLONE_ASK_PASSWORD": "false",
}
_environment_lock = threading.Lock()


class Admin:
    """The remotes of one rclone configuration file; rclone's own default when `config` is None.

    For the command line: each call starts a process and, while it runs, sets variables of this
    process's environment.
    """

    def __init__(self, *, config: Path | None = None) -> None:
        self._config = config

    def remotes(self) -> list[str]:
        """Return the names of the configured remotes, without colons."""
        with self._rclone("list rclone's remotes"):
            return [name.removesuffix(":") for name in rclone_python.get_remotes()]

    def exists(self, name: str) -> bool:
        """Whether a remote of this name is configured. Raises UsageError for an illegal name."""
        return _vetted(_NAME, name, "the remote's name") in self.remotes()

    def create(self, name: str, kind: str, options: Mapping[str, str] | None = None) -> None:
        """Configure a new remote of rclone's type `kind`, e.g. "webdav", "drive", "local".

        Raises UsageError for characters that a shell would understand, for secrets (other users
        can read command lines), and when the name is taken; RemoteError when rclone refuses.
        """
        _vetted(_NAME, name, "the remote's name")
        _vetted(_NAME, kind, "the remote's type")
        for key, value in (options or {}).items():
            _vetted(_KEY, key, "the option's name")
            _vetted(_VALUE, value, f"the option {key}")
            if _SECRET.search(key):
                raise UsageError(
                    f"create the remote {name!r}",
                    why=f"{key} is a secret, and command lines are public",
                    hint=f"Set it with `rclone config update {name}` at a terminal of your own.",
                )
        if self.exists(name):
            raise UsageError(
                f"create the remote {name!r}", why="it exists", hint="Choose another name."
            )
        with self._rclone(f"create the remote {name!r}"):
            rclone_python.create_remote(name, kind, **(options or {}))

    def about(self, name: str) -> dict[str, int]:
        """Return what a remote says of its space, in bytes: "total", "used", "free", if it says.

        Raises RemoteError (NotFound, Transient, Fatal) when it cannot be asked.
        """
        _vetted(_NAME, name, "the remote's name")
        with self._rclone(f"ask the remote {name!r} for its space"):
            answer: dict[str, int] = rclone_python.about(f"{name}:")
        return answer

    def version(self) -> str:
        """Return rclone's version, e.g. "v1.75.2"."""
        with self._rclone("ask rclone for its version"):
            return str(rclone_python.version())

    @contextlib.contextmanager
    def _rclone(self, what: str) -> Iterator[None]:
        """Let rclone-python find our binary and configuration, and its failures be ours.

        By environment: it puts a set path unquoted on a command line, keeps the first one for
        good, and in places calls `rclone` by name whatever was set.
        """
        folder = str(find_rclone().parent)
        path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
        changes: dict[str, str | None] = {"PATH": path, **_LIMITS, "SYNCD_KEY": None}
        if self._config is not None:
            changes["RCLONE_CONFIG"] = str(self._config.absolute())
        with _environment_lock, _environment(changes):
            try:
                yield
            except RcloneException as error:
                raise _translated(what, error.error_msg) from error


def _translated(what: str, stderr: str) -> RemoteError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return from_answer(what, "", 500, (lines[-1] if lines else "rclone gave no reason").encode())


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or take out those that are None, while the block runs."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _vetted(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise UsageError(
            f"read {what} {text[:80]!r}",
            why="it holds a character that is not safe on a command line, is empty or too long",
            hint="Use letters, digits, - and _; for anything else, `rclone config` at a terminal.",
        )
    return text
