"""A log's two parts: the newest, which is written to, and the part before it, `<name>.1`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from protocol.publish import fsync_dir, rename_durable

# A part that is larger becomes the part before.
ROTATE_BYTES = 64 * 1024 * 1024
# What both parts of a log may take of a disk together.
LOG_BUDGET = 2 * ROTATE_BYTES


def is_log(path: str) -> bool:
    """Whether a growing file is the log of a stage, which goes on over runs and workers."""
    return path.endswith(".log") and path.count("/") == 1


def rotated(path: Path) -> Path:
    """The name under which the part before the newest is kept."""
    return path.with_name(path.name + ".1")


def rotate(path: Path, *, limit: int = ROTATE_BYTES) -> None:
    """Move a file of more than `limit` bytes out of the way; only the newest two parts are kept."""
    with contextlib.suppress(FileNotFoundError):
        if not path.exists():
            fsync_dir(path.parent)  # who moved it away may have been killed before this
        elif path.stat().st_size > limit:
            rename_durable(path, rotated(path))
