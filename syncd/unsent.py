"""What waits at an end to be sent, and since when nothing of it has got through."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.publish import publish_bytes
from protocol.status import duration, size

# What goes at once is not worth a file.
SHOWN_AFTER_SECONDS = 2.0
MEASURE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Unsent:
    """What waits: commands, bytes in all, and since when (by this machine's clock)."""

    commands: int
    bytes: int
    since: float

    def told(self, now: float) -> str:
        """Return it in one line, for a person."""
        commands = {0: [], 1: ["1 command"]}.get(self.commands, [f"{self.commands} commands"])
        waits = ", ".join([*commands, size(self.bytes)])
        return f"to be sent from here: {waits}, waiting for {duration(now - self.since)}"


class WaitingSince:
    """Since when nothing has got through while something waited; a log that flows waits never."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._progress: object = None

    def update(self, *, waits: bool, progress: object) -> float | None:
        """Return since when, None while nothing waits. `progress` changes when something went."""
        if not waits:
            self._since = None
        elif self._since is None or progress != self._progress:
            self._since = time.time()
        self._progress = progress
        return self._since


class UnsentFile:
    """Keeps `.syncd/unsent.json` at the controller: there while something has waited a little."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = WaitingSince()
        self._written: Unsent | None = None
        self._measured = 0.0
        path.unlink(missing_ok=True)  # of a daemon that was killed

    def update(
        self, *, waits: bool, progress: object, measure: Callable[[], tuple[int, int]]
    ) -> None:
        """Take stock; `measure` returns commands and bytes, and is called now and then only."""
        since = self._waiting.update(waits=waits, progress=progress)
        if since is None or time.time() - since < SHOWN_AFTER_SECONDS:
            if self._written is not None:
                self._path.unlink(missing_ok=True)
                self._written = None
            return
        if self._written and time.monotonic() - self._measured < MEASURE_SECONDS:
            return
        self._measured = time.monotonic()
        commands, count = measure()
        found = Unsent(commands=commands, bytes=count, since=since)
        if found != self._written:
            publish_bytes(self._path, json.dumps(asdict(found)).encode("utf-8"), mode=0o600)
            self._written = found
