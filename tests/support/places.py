"""A remote under test, and what is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from servers import Server

from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote


@dataclass
class Place:
    """A remote under test: `root` is where its files lie, `server` what serves them, if any."""

    remote: RcloneRemote
    rclone: Rclone
    root: Path
    server: Server | None
