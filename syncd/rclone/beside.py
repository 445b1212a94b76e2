"""An rclone of a command's own, beside that of a daemon which may run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from syncd.config import Settings
from syncd.rclone.rcd import Rclone


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[Rclone]:
    """Run an rclone with an end's configuration while the block does. Raises RemoteError."""
    config = Path(settings.rclone_config) if settings.rclone_config else None
    with (
        tempfile.TemporaryDirectory(prefix="syncd-") as folder,
        Rclone(Path(folder) / "rclone", config=config, bwlimit=settings.bwlimit) as rclone,
    ):
        yield rclone
