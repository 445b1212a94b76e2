"""How a notebook's VM reaches the shared folder: the remotes that its cell is given, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import ConfigError, RemoteError, UsageError
from protocol.paths import Layout
from syncd.bridge import OBJECTS, current_url, objects_folder, read_password
from syncd.bridge.running import is_running, read_record
from syncd.bridge.told import worker_remote
from syncd.config import Settings
from syncd.notebook.cell import Platform
from syncd.rclone.address import is_address, is_loopback, parse_address
from syncd.rclone.admin import Admin
from syncd.rclone.errors import shown
from syncd.setup import absolute, is_local

_WHAT = "syncd bootstrap"
_TUNNEL = "Start it with a tunnel: `syncd watch --tunnel cloudflared`, say. Or give --url."


@dataclass(frozen=True, kw_only=True)
class Way:
    """What is asked for: by the bridge, which is at `url` if that is given, or by a remote; where
    neither is said, as this end is made."""

    platform: Platform
    bridge: bool = False
    remote: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The remotes as a worker reaches them, in order, and what a person has to mind of them."""

    remotes: tuple[str, ...]
    notes: tuple[str, ...]


def find_reach(layout: Layout, settings: Settings, way: Way) -> Reach:
    """Return how a VM reaches the folder.

    Raises UserError where it cannot: a folder or a loopback address of this machine, a bridge that
    does not run.
    """
    url = _given_url(way.url) if way.url else ""
    if way.bridge or (not way.remote and settings.remote == str(objects_folder(layout))):
        remotes = (_bridge(layout, url), *settings.fallback)
    elif way.remote:
        remotes = (way.remote,)
    else:
        remotes = (settings.remote, *settings.fallback)
    if way.platform is Platform.JUPYTER:
        remotes = tuple(map(absolute, remotes))
    else:
        _check_seen(layout, settings, remotes, given=bool(way.remote))
    return Reach(remotes=remotes, notes=tuple(_notes(settings, remotes, way)))


def _given_url(text: str) -> str:
    """Return a bridge's URL without a slash or /objects at its end. Raises UsageError."""
    base = text.rstrip("/").removesuffix(f"/{OBJECTS}")
    try:
        host = urlsplit(base).hostname
        parse_address(worker_remote(base, "password"))
    except (ValueError, ConfigError) as error:
        why = error.why if isinstance(error, ConfigError) else str(error)
        raise UsageError(_WHAT, why=f"--url {shown(text)}: {why}", hint=_URL) from None
    if "@" in base or not host:
        raise UsageError(_WHAT, why=f"--url {shown(text)}: it is more than an address", hint=_URL)
    return base


_URL = "Give the bridge's, such as https://host, without user and password."


def _bridge(layout: Layout, given: str) -> str:
    """Return the remote that the bridge is for a worker."""
    hint = "Start it: `syncd watch --tunnel cloudflared`, say. Or give --url."
    password, record = read_password(layout), read_record(layout)
    if password is None or record is None:
        why = "no bridge ran for this folder yet, so it has no password"
        raise RemoteError(_WHAT, path=layout.root, why=why, hint=hint)
    if not given and (is_running(layout) is False or current_url(layout) is None):
        why = "no bridge runs for this folder, or its tunnel has told no URL yet"
        raise RemoteError(_WHAT, path=layout.root, why=why, hint=hint)
    return worker_remote(given or record.url, password)


def _check_seen(
    layout: Layout, settings: Settings, remotes: tuple[str, ...], *, given: bool
) -> None:
    """Raise UserError for what only this machine sees."""
    for remote in remotes:
        if is_address(remote):
            parse_address(remote)
            if _is_here(remote):
                why = f"{shown(remote)} is an address of this machine, which a VM does not reach"
                raise UsageError(_WHAT, why=why, hint=_TUNNEL)
        elif is_local(remote):
            why = f"the remote {remote} is a folder of this machine, which a VM does not see"
            hint = _meant(remote, settings)
            if given:
                raise UsageError(_WHAT, why=why, hint=hint)
            raise ConfigError(_WHAT, path=layout.settings, why=why, hint=hint)


def _is_here(remote: str) -> bool:
    return is_address(remote) and is_loopback(urlsplit(remote).hostname or "")


def _meant(remote: str, settings: Settings) -> str:
    """Return what to give in place of a local folder: a remote of that name, where there is one."""
    name, slash, rest = remote.partition("/")
    config = Path(settings.rclone_config) if settings.rclone_config else None
    if name in Admin(config=config).remotes():
        return f"Did you mean `{name}:{rest if slash else ''}`?"
    return "Give --bridge, or --remote with one of rclone's remotes."


def _notes(settings: Settings, remotes: tuple[str, ...], way: Way) -> Iterator[str]:
    own = (settings.remote, *settings.fallback)
    if way.remote and not {way.remote, *remotes} & set(own):
        yield (
            f"{shown(remotes[0])} is no remote of this end: the worker and this end meet only if "
            f"it is the same place as {' or '.join(map(shown, own))}."
        )
    for remote in remotes:
        if _is_here(remote):
            yield (
                f"{shown(remote)} is an address of this machine: no other one reaches it. "
                f"For another one: {_TUNNEL[0].lower()}{_TUNNEL[1:]}"
            )
        elif is_local(remote):
            yield f"{remote} is a folder of this machine: it has to be seen at the worker's, too."
