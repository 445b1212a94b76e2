"""What was refused of what arrived: how much, the last of it, and what is not read again.

Whoever can write to the remote can fill it. So memory here is bounded, and an object that was
refused once is never read again; one that is not whole, and a folder of which nobody says whose it
is, are looked at ever more rarely, since they may yet turn out well.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from protocol.logs import stamp

log = logging.getLogger("syncd")

# Of each, a few dozen bytes are kept.
REMEMBERED = 50_000
# So many looks are free; after them, twice as long passes before each.
FREE_LOOKS = 5
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 3600.0
LOGGED = 20
# What was refused is told for so long after the last of it.
TOLD_SECONDS = 3600.0


class Refusals:
    """Counts refusals, and says what is worth another look. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.count = 0
        self.last = ""
        self._clock = clock
        self._last_at = (-math.inf, 0.0)  # by that clock, and by the calendar
        # By the hash of a path, which nobody else can foresee: how many looks, and the next one.
        self._looks: dict[int, tuple[int, float]] = {}

    def refuse(self, path: str, why: str) -> None:
        """Count what is at `path`, once, and never find it due again."""
        if self.is_refused(path):
            return
        self.count += 1
        self.last = why
        self._last_at = (self._clock(), time.time())
        self._remember(path, 0, math.inf)
        if self.count <= LOGGED or self.count.bit_count() == 1:
            log.warning("refused (%d so far): %s", self.count, why)

    def told(self) -> str:
        """Say what was refused, for a person; "" when none was of late."""
        when, at = self._last_at
        if self._clock() - when > TOLD_SECONDS:
            return ""
        objects = "1 object was" if self.count == 1 else f"{self.count} objects were"
        return f"{objects} refused; the last, at {stamp(at)}: {self.last}"

    def postpone(self, path: str) -> None:
        """Note a look at what may yet turn out well."""
        looks = self._looks.get(hash(path), (0, 0.0))[0] + 1
        doublings = min(looks - FREE_LOOKS, 32)
        pause = min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)
        self._remember(path, looks, self._clock() + pause if doublings >= 0 else -math.inf)

    def is_due(self, path: str) -> bool:
        """Whether to look at what is at `path`."""
        return self._looks.get(hash(path), (0, -math.inf))[1] <= self._clock()

    def is_refused(self, path: str) -> bool:
        """Whether it was refused, as far as is remembered."""
        return self._looks.get(hash(path), (0, 0.0))[1] == math.inf

    def forget(self, path: str) -> None:
        """Forget what was noted of something that has turned out well, or is gone."""
        self._looks.pop(hash(path), None)

    def _remember(self, path: str, looks: int, due: float) -> None:
        self._looks.pop(hash(path), None)
        self._looks[hash(path)] = (looks, due)
        if len(self._looks) > REMEMBERED:
            del self._looks[next(iter(self._looks))]
