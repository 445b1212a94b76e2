"""`syncd up` and `syncd down`: a Colab session for this folder, with Google's own client."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.durations import DURATION_HINT, parse_duration
from protocol.errors import UsageError
from protocol.wire import Role
from syncd.cli import Flag, Folder
from syncd.notebook.colab import Colab, Gpu

if TYPE_CHECKING:
    from protocol.paths import Layout
    from syncd.config import Settings

_UP, _DOWN = "syncd up", "syncd down"


def up(
    *,
    gpu: Gpu = Gpu.T4,
    timeout: str = "15m",
    no_wait: Flag = False,
    stop_when_idle: str = "",
    folder: Folder = None,
) -> None:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    gpu
        What the session is made with.
    timeout
        How long to wait for the worker's first status.
    no_wait
        Do not wait for it.
    stop_when_idle
        Have the worker end, and the VM given back, when nothing was to be done for so long: "30m".
    folder
        The shared folder's end here.
    """
    from syncd.config import required_key
    from syncd.notebook.cell import check_idle_time
    from syncd.notebook.command import colab_cell
    from syncd.notebook.session import bring_up, wait_for_worker
    from syncd.view import is_watched, read_status

    check_idle_time(_UP, stop_when_idle)
    seconds = parse_duration(timeout)
    if not seconds:
        raise UsageError(_UP, why=f"--timeout {timeout!r} is no time", hint=DURATION_HINT)
    layout, settings = _controller(_UP, folder)
    if is_watched(layout) is False:
        why = f"no `syncd watch` runs in {layout.root}: the worker's status cannot arrive"
        if not no_wait:
            raise UsageError(_UP, why=why, hint="Start it first, in another terminal.")
        print(f"note: {why}", file=sys.stderr)
    before = read_status(layout)
    brought = bring_up(
        layout,
        Colab.find(),
        gpu=gpu,
        key=required_key(layout, settings),
        make_cell=lambda: colab_cell(layout, settings, stop_when_idle=stop_when_idle),
        tell=_tell,
    )
    if no_wait:
        brought.leave()
        return
    _show(wait_for_worker(layout, brought, before=before, seconds=seconds))
    if found := read_status(layout):
        _tell(f"worker {found.worker} on {found.host} is there; `syncd status` shows how it is")


def down(*, now: Flag = False, folder: Folder = None) -> None:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    now
        Do not wait until the queue is empty and everything is here.
    folder
        The shared folder's end here.
    """
    from syncd.notebook.session import read_session, take_down, wait_until_free
    from syncd.view import is_watched

    layout, _ = _controller(_DOWN, folder)
    session = read_session(layout)
    if session is None:
        _tell("no session was begun from here")
        return
    client = Colab.find()
    client.check()
    if not now and session.name in client.sessions():
        if is_watched(layout) is False:
            raise UsageError(
                _DOWN,
                path=layout.root,
                why="no `syncd watch` runs here, so what the session holds is not known",
                hint="Start it first, or give --now.",
            )
        _show(wait_until_free(layout))
    take_down(layout, client, session)
    _tell(f"session {session.name} has ended")


def _controller(what: str, folder: Path | None) -> tuple[Layout, Settings]:
    from syncd.config import load_settings
    from syncd.view import find_folder

    layout = find_folder(folder or Path())
    settings = load_settings(layout, {})
    if settings.role is not Role.CONTROLLER:
        why = "this end is the worker's"
        raise UsageError(what, path=layout.root, why=why, hint="Run it at the controller's end.")
    return layout, settings


def _tell(text: str) -> None:
    print(text, flush=True)


def _show(texts: Iterable[str]) -> None:
    """Show how something goes until it is over: in one line of a terminal, else each news once."""
    from protocol.logs import one_line
    from syncd.show import plain_console

    console, last = plain_console(stderr=True), ""
    if not console.is_terminal:
        for text in texts:
            if text != last:
                print(f"waiting: {one_line(text)}", file=sys.stderr)
            last = text
        return
    with console.status("waiting") as line:
        for text in texts:
            line.update(f"waiting: {one_line(text)[: console.width - 12]}")
