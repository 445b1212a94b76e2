"""`syncd init`: makes a folder one end of a shared folder."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protocol.errors import ConfigError, RemoteError, UsageError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.bridge import objects_folder
from syncd.config import (
    Key,
    Settings,
    load_key,
    load_settings,
    make_private,
    read_key,
    toml_text,
)
from syncd.platform import check_worker_system, is_locked, starts_with_drive
from syncd.rclone.address import is_address
from syncd.rclone.admin import Admin
from syncd.rclone.errors import shown, without_secrets

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
    fallback: Sequence[str] = (),
    key_file: Path | None = None,
    unsealed: bool = False,
    rclone_config: str = "",
) -> str:
    """Write an end's settings, key and first files; return what to tell the user.

    What is there already stays, but for the settings given here. Raises ConfigError when the key
    cannot be had, RemoteError when rclone does not know the remote, UsageError for options that do
    not go together, or not with what this end has been at work on.
    """
    if role is Role.WORKER:
        check_worker_system()
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
    others = tuple(map(absolute, fallback))
    settings = Settings(
        role=role,
        remote=absolute(remote),
        fallback=others,
        rclone_config=rclone_config,
        unsealed=unsealed,
    )
    if known is not None:
        settings = replace(
            known,
            role=role,
            remote=settings.remote,
            fallback=others or known.fallback,
            rclone_config=rclone_config or known.rclone_config,
            unsealed=unsealed,
        )
    key = None if unsealed else _key(layout, role, key_file)
    if known is not None and (layout.private / "state.db").exists():
        check_same_end(layout, known, settings)
        _check_same_key(layout, role, key)
    _check_remotes(settings)
    try:
        _write(layout, settings, key)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError("syncd init", path=error.filename or layout.root, why=why) from error
    return _told(layout, settings, key)


def check_same_end(layout: Layout, known: Settings, settings: Settings) -> None:
    """An end that was at work stays the end that it is: its state says what it sent, and where.

    Raises UsageError where `settings` make another one of it than `known` says that it was.
    """
    why = hint = ""
    if known.role is not settings.role:
        why = f"it is the {known.role}'s end, and has been at work"
        hint = f"Make the {settings.role}'s end in another folder."
    elif not _same_remote(known.remote, settings.remote):
        before, after = shown(known.remote), shown(settings.remote)
        why = f"it has been at work on {before}"
        hint = (
            "Make another folder an end, or take along what is on that remote: stop `syncd watch`, "
            f"`rclone copy {before} {after}`, set remote in {layout.settings}."
        )
    if why:
        raise UsageError("syncd init", path=layout.root, why=why, hint=hint)


def _check_same_key(layout: Layout, role: Role, key: Key | None) -> None:
    if not _same(key, load_key(layout)):
        raise UsageError(
            "syncd init",
            path=layout.root,
            why="it has been at work with another key, or with none",
            hint="If the other end has a new key, add --rotate; else make the "
            f"{role}'s end in another folder.",
        )


def _same_remote(before: str, after: str) -> bool:
    """Whether two remotes may be one: a bridge's URL changes with its tunnel."""
    return before == after or (is_address(before) and is_address(after))


def _same(key: Key | None, other: Key | None) -> bool:
    """Whether two keys seal alike."""
    return (key and (key.folder, key.secret)) == (other and (other.folder, other.secret))


def rotate(layout: Layout, *, key_file: Path | None = None) -> str:
    """Put a new key in the place of this end's; return what to tell the user.

    The controller makes it; with `key_file`, as at the worker, it is taken from there. The key
    before stays beside it, to open what is older, until the daemon takes it out. Raises UsageError
    where there is nothing to rotate, and for a key that cannot follow this one.
    """
    role = load_settings(layout, {}).role
    if os.environ.get("SYNCD_KEY"):
        raise UsageError(
            _ROTATE,
            why="$SYNCD_KEY is set, and goes before .syncd/key",
            hint="Put what the controller's .syncd/key holds there, both lines, or unset it.",
        )
    current = load_key(layout)
    if current is None:
        raise UsageError(_ROTATE, path=layout.key, why="there is no key", hint="Run `syncd init`.")
    key = _next_key(layout, role, current, key_file)
    key.save(layout)
    lines = [f"{layout.key} has the new key; the one before only opens what is older"]
    if is_locked(layout.private / "lock"):
        lines.append("a `syncd watch` runs here, and has the old one until it is restarted")
    if role is Role.CONTROLLER and key_file is None:
        lines.append("next: restart `syncd watch` here, and give the worker a copy of that file:")
        lines.append("`syncd init --rotate --key-file COPY` there, and restart its `syncd watch`")
        lines.append("(in a notebook: run the cell that `syncd bootstrap` now makes)")
    else:
        lines.append("next: restart `syncd watch`")
    return "\n".join(lines)


_ROTATE = "syncd init --rotate"


def _next_key(layout: Layout, role: Role, current: Key, key_file: Path | None) -> Key:
    if key_file is not None:
        return _given_key(layout, current, _read(key_file))
    if role is Role.WORKER:
        raise UsageError(
            _ROTATE,
            why="it is the controller that makes a new key",
            hint="Rotate it there, and give a copy of its .syncd/key with --key-file.",
        )
    if current.previous:
        raise UsageError(
            _ROTATE,
            path=layout.key,
            why="a rotation is under way: it holds two keys",
            hint="It is over once the worker has the new one and both ends run.",
        )
    return current.rotated()


def _given_key(layout: Layout, current: Key, given: Key) -> Key:
    """Return what to keep of a key that another end has made."""
    why = hint = ""
    if given.folder != current.folder:
        why, hint = "it is the key of another shared folder", "Copy the key of this one."
    elif given.secret == current.previous:
        why, hint = "it is the key that was replaced", "Copy the newest one."
    if why:
        raise UsageError(_ROTATE, path=layout.key, why=why, hint=hint)
    if given.previous or given.secret == current.secret:
        return current if given.secret == current.secret else given
    return replace(given, previous=current.secret)


def _check_remotes(settings: Settings) -> None:
    """Named remotes must be ones that rclone has. Raises RemoteError."""
    for remote in (settings.remote, *settings.fallback):
        _check_known(remote, settings)


def _check_known(remote: str, settings: Settings) -> None:
    named = re.match(r"([^:,/\\]+):", remote)
    if not named or os.path.isabs(remote) or is_address(remote):
        return
    config = Path(settings.rclone_config) if settings.rclone_config else None
    known = Admin(config=config).remotes()
    if named[1] not in known:
        raise RemoteError(
            "syncd init",
            path=remote,
            why=f"rclone has no remote {named[1]!r}",
            hint=f"It has: {', '.join(known) or 'none'}. `rclone config` makes one.",
        )


def _write(layout: Layout, settings: Settings, key: Key | None) -> None:
    make_dirs(layout.root)
    make_private(layout)
    if key:
        key.save(layout)
    secret = any(without_secrets(r) != r for r in (settings.remote, *settings.fallback))
    mode = 0o600 if secret else 0o644
    publish_bytes(layout.settings, toml_text(settings).encode("utf-8"), mode=mode)
    make_dirs(layout.inbox)
    if settings.role is Role.CONTROLLER:
        make_dirs(layout.serve)
        if not any(layout.serve.iterdir()):
            publish_bytes(layout.serve / "stages.toml", STAGES_START)
        if not layout.queue.exists():
            publish_bytes(layout.queue, QUEUE_START)


def is_local(remote: str) -> bool:
    """Whether a remote is a folder of this machine, as rclone reads it.

    A name before a colon is a remote's; a slash before it makes it a path, and so does a drive's
    letter on Windows.
    """
    remote = remote.strip()
    named = not starts_with_drive(remote) and re.match(r"[^:,/\\]*[:,].*", remote) and ":" in remote
    return bool(remote) and not named


def absolute(remote: str) -> str:
    """Return a local folder as it is meant from here, wherever the daemon is started later."""
    remote = remote.strip()
    if not is_local(remote):
        return remote
    try:
        return str(Path(remote).expanduser().resolve())
    except RuntimeError as error:
        raise UsageError("syncd init", path=remote, why=str(error)) from error


def _key(layout: Layout, role: Role, key_file: Path | None) -> Key:
    if key_file is not None:
        return _read(key_file)
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


def _read(key_file: Path) -> Key:
    return Key.parse(sys.stdin.read()) if str(key_file) == "-" else read_key(key_file)


def _told(layout: Layout, settings: Settings, key: Key | None) -> str:
    lines = [f"{layout.root} is the {settings.role}'s end; remote {shown(settings.remote)}"]
    if key is None:
        lines.append("NOT SEALED: whoever can write to the remote can run code on the worker.")
    elif settings.role is Role.CONTROLLER:
        lines.append(f"key: {layout.key} (secret; the worker needs a copy)")
    if settings.role is Role.CONTROLLER:
        bridge = " --bridge" if settings.remote == str(objects_folder(layout)) else ""
        watch = f"`syncd watch{bridge}`"
        lines.append(f"next: edit serve/stages.toml, start {watch}, append to queue.txt")
    else:
        lines.append("next: start `syncd watch`")
    return "\n".join(lines)
