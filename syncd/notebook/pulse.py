"""Whether a worker still answers, by the file that it touches with each round of its main loop."""

from __future__ import annotations

import time
from pathlib import Path

# A look that comes so late says that the one who looks was suspended, with the machine perhaps.
LATE_SECONDS = 10.0


class Pulse:
    """For how long a worker has shown no sign of life, by this process's monotonic clock alone.

    That the file's time has changed is the sign; what it says is no matter, a clock may be wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._since = self._looked = 0.0

    def mark(self) -> int:
        """Return the file's time, in nanoseconds; 0 while there is none."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def silence(self, began: int, *, now: float | None = None) -> float:
        """Return for how many seconds there was no sign. To be called every few seconds.

        `began` is the file's mark when the worker was started: as long as that is its mark, the
        worker is about to begin, which may take long, and is not silent.
        """
        now = time.monotonic() if now is None else now
        mark = self.mark()
        late = now - self._looked > LATE_SECONDS
        if late or mark == began or mark != self._seen:
            self._seen, self._since = mark, now
        self._looked = now
        return now - self._since
