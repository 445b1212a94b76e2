"""`syncd bootstrap`: what makes a notebook's VM the worker of this shared folder."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from protocol.errors import ConfigError, RemoteError, UsageError
from syncd.cli import Flag, Folder, Json
from syncd.notebook.cell import (
    SECRETS,
    Platform,
    Wanted,
    cell_text,
    check_idle_time,
    notebook,
)

if TYPE_CHECKING:
    from protocol.paths import Layout
    from syncd.config import Key, Settings
    from syncd.notebook.payload import Payload
    from syncd.notebook.reach import Way

_WHAT = "syncd bootstrap"
_HINT = "At the laptop, `syncd bootstrap` makes a cell for what is reached where now."
_BRIDGE_HINT = f"Does `syncd watch` run at the laptop, with its tunnel? {_HINT}"


def bootstrap(
    *,
    platform: Platform,
    bridge: Flag = False,
    remote: str = "",
    url: str = "",
    worker_folder: str = "",
    without_trainer: Flag = False,
    stop_when_idle: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    platform
        Whose notebooks: colab, kaggle or jupyter.
    bridge
        The worker reaches this folder through the bridge, which must run; so it is by
        default for an end that was made with `syncd init --bridge`.
    remote
        The worker reaches it through this remote of rclone's; this end's own by default.
    url
        Where the bridge is reached, when that cannot be found out.
    worker_folder
        The worker's folder there: /content/syncd, /kaggle/temp/syncd or ~/syncd by default.
    without_trainer
        Do not install what `trainer` needs, torch and onnx among it.
    stop_when_idle
        Have the worker end, and the VM given back, when nothing was to be done for so long: "30m".
    output
        Where the notebook is written; syncd-<platform>.ipynb in the shared folder by default.
    folder
        The shared folder's end here.
    json
        Print the cell, where the notebook is, and what to mind, as JSON.
    """
    from syncd.config import load_settings
    from syncd.notebook.reach import Way
    from syncd.view import find_folder

    if bridge and remote:
        raise UsageError(_WHAT, why="--bridge and --remote do not go together")
    check_idle_time(_WHAT, stop_when_idle)
    layout = find_folder(folder or Path())
    made = _make(
        layout,
        load_settings(layout, {}),
        _Asked(
            way=Way(platform=platform, bridge=bridge, remote=remote, url=url),
            worker_folder=worker_folder,
            trainer=not without_trainer,
            stop_when_idle=stop_when_idle,
        ),
    )
    path = output or layout.root / f"syncd-{platform}.ipynb"
    _write(path, notebook(platform, made.cell))
    if json:
        value = {"cell": made.cell, "notebook": str(path), "notes": list(made.notes)}
        print(jsonlib.dumps(value, indent=1, ensure_ascii=False))
        return
    print(made.cell, end="")
    for note in (f"This cell is also in {path}, a notebook ready to be opened.", *made.notes):
        print(f"\n{note}", file=sys.stderr)


def colab_cell(layout: Layout, settings: Settings, *, stop_when_idle: str) -> str:
    """Return the cell for a Colab session, as `syncd bootstrap --platform colab` makes it."""
    from syncd.notebook.reach import Way

    asked = _Asked(way=Way(platform=Platform.COLAB), stop_when_idle=stop_when_idle)
    return _make(layout, settings, asked).cell


@dataclass(frozen=True, kw_only=True)
class _Asked:
    way: Way
    worker_folder: str = ""
    trainer: bool = True
    stop_when_idle: str = ""


@dataclass(frozen=True, kw_only=True)
class _Made:
    cell: str
    notes: tuple[str, ...]


def _make(layout: Layout, settings: Settings, asked: _Asked) -> _Made:
    from syncd.bridge import bootstrap_folder
    from syncd.config import required_key
    from syncd.notebook.payload import make_payload
    from syncd.notebook.reach import find_reach
    from syncd.notebook.sealed import secret_of
    from syncd.rclone.address import is_address

    key = required_key(layout, settings)
    reach = find_reach(layout, settings, asked.way)
    payload = make_payload(bootstrap_folder(layout), secret_of(key))
    named = [remote for remote in reach.remotes if not is_address(remote)]
    text, notes = _brought(settings, payload, named, needed=len(named) == len(reach.remotes))
    if not payload.has_rclone:
        notes = (*notes, "rclone's wheel could not be fetched here: the VM has to get it itself.")
    wanted = Wanted(
        platform=asked.way.platform,
        remotes=reach.remotes,
        rclone=text,
        folder=asked.worker_folder,
        trainer=asked.trainer,
        stop_when_idle=asked.stop_when_idle,
        hint=_BRIDGE_HINT if len(named) < len(reach.remotes) else _HINT,
    )
    about_key = _about_key(layout, asked.way.platform, key)
    return _Made(cell=cell_text(wanted, key), notes=(*about_key, *reach.notes, *notes))


def _about_key(layout: Layout, platform: Platform, key: Key | None) -> tuple[str, ...]:
    if key is None:
        return ("NOT SEALED: the cell holds the remote's password for all who read it.",)
    which = "the first line of" if key.previous else "the line in"
    return (SECRETS[platform], f"The key is {which} {layout.key}.")


def _brought(
    settings: Settings, payload: Payload, named: Sequence[str], *, needed: bool
) -> tuple[str, tuple[str, ...]]:
    """Bring what the cell fetches to rclone's remotes; return their configuration, and notes.

    Raises RemoteError when none of them answers, if one is `needed`.
    """
    from syncd.notebook.payload import upload
    from syncd.notebook.rclone_config import excerpt
    from syncd.rclone.beside import opened
    from syncd.rclone.errors import shown
    from syncd.rclone.remote import RcloneRemote

    if not named:
        return "", ()
    missed: list[tuple[str, RemoteError]] = []
    with opened(settings) as rclone:
        found = excerpt(rclone, named)
        for name in named:
            try:
                upload(payload, RcloneRemote(rclone, name, treat_as=settings.profile))
            except RemoteError as error:
                missed.append((name, error))
    if needed and len(missed) == len(named):
        raise missed[0][1]
    notes = (
        f"{shown(name)} was not reached, so a cell cannot fetch from there until this is run "
        f"again: {error}"
        for name, error in missed
    )
    return found.text, (*found.notes, *notes)


def _write(path: Path, data: bytes) -> None:
    from protocol.publish import publish_bytes

    try:
        publish_bytes(path, data)
    except OSError as error:
        raise ConfigError(_WHAT, path=path, why=error.strerror or str(error)) from error
