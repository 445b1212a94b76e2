"""`status.txt` and `results.json` in the remote's root, for a person who browses it.

A courtesy on which nothing relies: what fails is left for the next time, and neither end reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import RemoteError
from protocol.publish import temporary_beside
from syncd.rclone.remote import Remote

log = logging.getLogger("syncd")

# At most one copy in so many seconds; a person who reloads a page on a phone is not quicker.
COURTESY_SECONDS = 5.0


class Courtesy:
    """Keeps copies of a few small files in the remote's root."""

    def __init__(self, files: Sequence[Path], scratch: Path) -> None:
        self._files = files
        self._scratch = scratch
        self._shown: dict[Path, bytes] = {}

    def publish(self, remote: Remote) -> bool:
        """Bring what is new of the files to the remote; return whether anything was."""
        new = False
        for path in self._files:
            try:
                content = path.read_bytes()
                if self._shown.get(path) != content:
                    self._replace(remote, path.name, content)
                    self._shown[path] = content
                    new = True
            except (OSError, RemoteError) as error:
                log.debug("%s is not shown on the remote: %s", path.name, error)
        return new

    def _replace(self, remote: Remote, name: str, content: bytes) -> None:
        # From a copy: rclone gives up on a source that changes meanwhile.
        source = temporary_beside(self._scratch / name)
        try:
            source.write_bytes(content)
            remote.replace(source, name)
        finally:
            source.unlink(missing_ok=True)
