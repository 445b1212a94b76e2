"""How the worker that a keeper looks after has ended, how often, and when last."""

from __future__ import annotations

import time
from pathlib import Path

from protocol.logs import one_line, stamp

# For so long it is told of.
TOLD_SECONDS = 600.0
_ERROR = "syncd: error: "
_WINDOW = 65536


class Endings:
    """Those that the keeper has not brought about itself."""

    def __init__(self) -> None:
        self._count = 0
        self._why = ""
        self._when = 0.0
        self._noted = 0.0

    def note(self, why: str) -> None:
        """Note that the worker has ended just now."""
        self._count += 1
        self._why, self._when, self._noted = why, time.time(), time.monotonic()

    def told(self, *, now: float | None = None) -> str:
        """Return it for a person, "" when it is long over. `now` is by the monotonic clock."""
        now = time.monotonic() if now is None else now
        if not self._count or now - self._noted > TOLD_SECONDS:
            return ""
        often = "" if self._count == 1 else f" ({self._count} times so far)"
        why = f": {self._why}" if self._why else ""
        return f"the worker ended at {stamp(self._when)} and is started again{often}{why}"


def told_code(code: int, log: Path, start: int) -> str:
    """Return how a process has ended, by its exit code and by what it has added to its log."""
    if code < 0:
        return f"killed by signal {-code}"
    said = last_error(log, start)
    return f"exit code {code}: {said}" if said else f"exit code {code}"


def last_error(log: Path, start: int) -> str:
    """Return the error that a `syncd watch` has ended with, "" if it said none from `start` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, file.seek(0, 2) - _WINDOW))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return one_line(found[-1]) if found else ""
