"""`syncd init`: makes a folder one end of a shared folder."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from protocol.errors import ConfigError, RemoteError, UsageError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.config import (
    Key,
    Settings,
    load_key,
    load_settings,
    make_private,
    read_key,
    toml_text,
)
from syncd.rclone.admin import Admin

QUEUE_START = b"""\
# One command a line, appended at the end: run:<stage>, stop:<stage>, sh:<base64>.
# `syncd run STAGE`, `syncd stop STAGE` and `syncd sh 'COMMAND'` append them too.
"""
STAGES_START = b"""\
# What the worker can run. A command given as text is run by /bin/sh -c in the folder of this file.
[stages.hello]
command = "echo hello from $(hostname); uptime"
gpu = 0
"""


def initialise(
    layout: Layout,
    *,
    role: Role,
    remote: str,
    key_file: Path | None = None,
    unsealed: bool = False,
    rclone_config: str = "",
) -> str:
    """Write an end's settings, key and first files; return what to tell the user.

    What is there already stays, but for the settings given here. Raises ConfigError when the key
    cannot be had, RemoteError when rclone does not know the remote, UsageError for options that do
    not go together, or not with what this end has been at work on.
    """
    if unsealed and key_file:
        raise UsageError("syncd init", why="--unsealed and --key-file do not go together")
    if unsealed and layout.key.exists():
        raise UsageError(
            "syncd init",
            path=layout.key,
            why="--unsealed, and there is a key, which would be used",
            hint="Move it away, at both ends, to do without.",
        )
    known = load_settings(layout, {}, {}) if layout.settings.exists() else None
    settings = Settings(role=role, remote=_absolute(remote), rclone_config=rclone_config)
    if known is not None:
        config = rclone_config or known.rclone_config
        settings = replace(known, role=role, remote=settings.remote, rclone_config=config)
    key = None if unsealed else _key(layout, role, key_file)
    if known is not None and (layout.private / "state.db").exists():
        _check_same(layout, known, settings, key)
    _check_remote(settings)
    try:
        _write(layout, settings, key)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError("syncd init", path=error.filename or layout.root, why=why) from error
    return _told(layout, settings, key)


def _check_same(layout: Layout, known: Settings, settings: Settings, key: Key | None) -> None:
    """An end that was at work stays the end that it is: its state says what it sent, and where."""
    why = hint = ""
    if known.role is not settings.role:
        why = f"it is the {known.role}'s end, and has been at work"
        hint = f"Make the {settings.role}'s end in another folder."
    elif known.remote != settings.remote:
        why = f"it has been at work on {known.remote}"
        hint = (
            "Make another folder an end, or take along what is on that remote: stop `syncd watch`, "
            f"`rclone copy {known.remote} {settings.remote}`, set remote in {layout.settings}."
        )
    elif key != load_key(layout):
        why = "it has been at work with another key, or with none"
        hint = f"Make the {settings.role}'s end in another folder."
    if why:
        raise UsageError("syncd init", path=layout.root, why=why, hint=hint)


def _check_remote(settings: Settings) -> None:
    """A named remote must be one that rclone has. Raises RemoteError."""
    named = re.match(r"([^:,/\\]+):", settings.remote)
    if not named or os.path.isabs(settings.remote):
        return
    config = Path(settings.rclone_config) if settings.rclone_config else None
    known = Admin(config=config).remotes()
    if named[1] not in known:
        raise RemoteError(
            "syncd init",
            path=settings.remote,
            why=f"rclone has no remote {named[1]!r}",
            hint=f"It has: {', '.join(known) or 'none'}. `rclone config` makes one.",
        )


def _write(layout: Layout, settings: Settings, key: Key | None) -> None:
    make_dirs(layout.root)
    make_private(layout)
    if key:
        key.save(layout)
    publish_bytes(layout.settings, toml_text(settings).encode("utf-8"))
    make_dirs(layout.inbox)
    if settings.role is Role.CONTROLLER:
        make_dirs(layout.serve)
        if not any(layout.serve.iterdir()):
            publish_bytes(layout.serve / "stages.toml", STAGES_START)
        if not layout.queue.exists():
            publish_bytes(layout.queue, QUEUE_START)


def _absolute(remote: str) -> str:
    """Return a local folder as it is meant from here, wherever the daemon is started later.

    A name before a colon is a remote's, as rclone reads it; a slash before it makes it a path, and
    so does a drive's letter on Windows.
    """
    remote = remote.strip()
    drive = os.name == "nt" and re.match(r"[A-Za-z]:", remote)
    named = not drive and re.match(r"[^:,/\\]*[:,].*", remote) and ":" in remote
    if named or not remote:
        return remote
    try:
        return str(Path(remote).expanduser().resolve())
    except RuntimeError as error:
        raise UsageError("syncd init", path=remote, why=str(error)) from error


def _key(layout: Layout, role: Role, key_file: Path | None) -> Key:
    if key_file is not None:
        return Key.parse(sys.stdin.read()) if str(key_file) == "-" else read_key(key_file)
    key = load_key(layout)
    if key is not None:
        return key
    if role is Role.WORKER:
        raise ConfigError(
            "syncd init",
            why="a worker needs the controller's key",
            hint="Give --key-file with the controller's .syncd/key, or set SYNCD_KEY; "
            "or --unsealed at both ends.",
        )
    return Key.new()


def _told(layout: Layout, settings: Settings, key: Key | None) -> str:
    lines = [f"{layout.root} is the {settings.role}'s end; remote {settings.remote}"]
    if key is None:
        lines.append("NOT SEALED: whoever can write to the remote can run code on the worker.")
    elif settings.role is Role.CONTROLLER:
        lines.append(f"key: {layout.key} (secret; the worker needs a copy)")
    if settings.role is Role.CONTROLLER:
        lines.append("next: edit serve/stages.toml, start `syncd watch`, append to queue.txt")
    else:
        lines.append("next: start `syncd watch`")
    return "\n".join(lines)
