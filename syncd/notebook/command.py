"""`syncd bootstrap`: what makes a notebook's VM the worker of this shared folder."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from protocol.errors import ConfigError, RemoteError, UsageError
from syncd.cli import Flag, Folder, Json
from syncd.notebook.cell import SECRETS, Platform, Wanted, cell_text, notebook

if TYPE_CHECKING:
    from protocol.paths import Layout
    from syncd.config import Settings

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
    from syncd.view import find_folder

    if bridge and remote:
        raise UsageError(_WHAT, why="--bridge and --remote do not go together")
    layout = find_folder(folder or Path())
    made = _make(
        layout,
        load_settings(layout, {}),
        _Asked(
            platform=platform,
            bridge=bridge,
            remote=remote,
            url=url,
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
    asked = _Asked(platform=Platform.COLAB, stop_when_idle=stop_when_idle)
    return _make(layout, settings, asked).cell


@dataclass(frozen=True, kw_only=True)
class _Asked:
    platform: Platform
    bridge: bool = False
    remote: str = ""
    url: str = ""
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
    from syncd.notebook.payload import make_payload, upload
    from syncd.notebook.rclone_config import excerpt
    from syncd.notebook.sealed import secret_of
    from syncd.rclone.address import is_address
    from syncd.rclone.beside import opened
    from syncd.rclone.remote import RcloneRemote

    key = required_key(layout, settings)
    remotes = _remotes(layout, settings, asked)
    payload = make_payload(bootstrap_folder(layout), secret_of(key))
    notes = [SECRETS[asked.platform], f"The key is the line in {layout.key}."]
    if key is None:
        notes = ["NOT SEALED: the cell holds the remote's password for all who read it."]
    named = [remote for remote in remotes if not is_address(remote)]
    text = ""
    if named:
        with opened(settings) as rclone:
            found = excerpt(rclone, named)
            for name in named:
                upload(payload, RcloneRemote(rclone, name, treat_as=settings.profile))
        text, notes = found.text, [*notes, *found.notes]
    if not payload.has_rclone:
        notes.append("rclone's wheel could not be fetched here: the VM has to get it itself.")
    wanted = Wanted(
        platform=asked.platform,
        remotes=remotes,
        rclone=text,
        folder=asked.worker_folder,
        trainer=asked.trainer,
        stop_when_idle=asked.stop_when_idle,
        hint=_BRIDGE_HINT if len(named) < len(remotes) else _HINT,
    )
    return _Made(cell=cell_text(wanted, key), notes=tuple(notes))


def _remotes(layout: Layout, settings: Settings, asked: _Asked) -> tuple[str, ...]:
    """Return the remotes as a worker reaches them, in order."""
    from syncd.bridge import objects_folder
    from syncd.bridge.told import worker_remote

    if asked.bridge or (not asked.remote and settings.remote == str(objects_folder(layout))):
        url, password = _bridge(layout, asked.url)
        return (worker_remote(url, password), *settings.fallback)
    first = asked.remote or settings.remote
    if os.path.isabs(first) and asked.platform is not Platform.JUPYTER:
        raise ConfigError(
            _WHAT,
            path=layout.settings,
            why=f"the remote {first} is a folder of this machine, which a VM does not see",
            hint="Give --bridge, or --remote with one of rclone's remotes.",
        )
    return (first, *(() if asked.remote else settings.fallback))


def _bridge(layout: Layout, given: str) -> tuple[str, str]:
    """Return where the bridge is reached, and its password."""
    from syncd.bridge import current_url, read_password
    from syncd.bridge.running import is_running, read_record

    hint = "Start it: `syncd watch --tunnel cloudflared`, say. Or give --url."
    password, record = read_password(layout), read_record(layout)
    if password is None or record is None:
        why = "no bridge ran for this folder yet, so it has no password"
        raise RemoteError(_WHAT, path=layout.root, why=why, hint=hint)
    if given:
        return given.rstrip("/"), password
    if is_running(layout) is False or current_url(layout) is None:
        why = "no bridge runs for this folder, or its tunnel has told no URL yet"
        raise RemoteError(_WHAT, path=layout.root, why=why, hint=hint)
    return record.url, password


def _write(path: Path, data: bytes) -> None:
    from protocol.publish import publish_bytes

    try:
        publish_bytes(path, data)
    except OSError as error:
        raise ConfigError(_WHAT, path=path, why=error.strerror or str(error)) from error
