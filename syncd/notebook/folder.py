"""What a cell asks for, and the worker's folder that is made for it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import UsageError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.config import Key, load_key, load_settings, make_private
from syncd.notebook.start import ELSEWHERE, whose
from syncd.setup import absolute, check_same_end, initialise, rotate

_WHAT = "make this machine a worker"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a cell asks for: its worker's folder, key ("" for none), and remotes, in order.

    `rclone` is the text of the configuration that these need; None: what the folder has.
    """

    folder: str
    key: str
    remotes: tuple[str, ...]
    rclone: str | None = None
    stop_when_idle: str = ""


def rclone_config(layout: Layout) -> Path:
    """Where a worker's configuration of rclone lies that a cell has brought."""
    return layout.private / "rclone.conf"


def prepare(layout: Layout, request: Request) -> None:
    """Make the folder a worker's end, as is asked for.

    Raises UserError; a folder that is another one's is then as it was.
    """
    given = Key.parse(request.key) if request.key else None
    _check(layout, request)
    make_dirs(layout.root)
    make_private(layout)
    kept = load_key(layout, {})
    if given and kept and (kept.secret, kept.previous) != (given.secret, given.previous):
        _rotate(layout, request.key)
    elif given:
        given.save(layout)
    config = rclone_config(layout)
    known = config.read_bytes() if config.exists() else b""
    if request.rclone is not None and request.rclone.encode("utf-8") != known:
        publish_bytes(config, request.rclone.encode("utf-8"), mode=0o600)
    initialise(
        layout,
        role=Role.WORKER,
        remote=request.remotes[0],
        fallback=request.remotes[1:],
        unsealed=given is None,
        rclone_config=str(config) if config.exists() and config.stat().st_size else "",
    )


def _check(layout: Layout, request: Request) -> None:
    """Raise UsageError for the folder of another shared folder, or of another remote's worker."""
    if others := whose(layout.root, request.key):
        raise UsageError(_WHAT, path=layout.root, why=f"it is {others}", hint=ELSEWHERE)
    if layout.settings.exists() and (layout.private / "state.db").exists():
        known = load_settings(layout, {}, {})
        wanted = replace(known, role=Role.WORKER, remote=absolute(request.remotes[0]))
        check_same_end(layout, known, wanted)


def _rotate(layout: Layout, key: str) -> None:
    with tempfile.TemporaryDirectory(dir=layout.private) as folder:
        file = Path(folder) / "key"
        publish_bytes(file, key.encode("ascii"), mode=0o600)
        rotate(layout, key_file=file)
