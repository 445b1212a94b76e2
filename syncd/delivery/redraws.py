"""When to say again what only takes the place of what was said before: a progress bar's next state.

Soon at first, so that a person sees it move, and then ever more rarely: after 1, 2, 4, 8 and 16
seconds and then every 20. A bar that is drawn ten times a second costs a small part of its bytes.
"""

from __future__ import annotations

import math
import time

FIRST_SECONDS = 1.0
MOST_SECONDS = 20.0
# Along with something else that is sent, it costs little.
ALONG_SECONDS = 5.0


class Redraws:
    """Keeps how often, and when last, it was said."""

    def __init__(self) -> None:
        self._said = 0, -math.inf

    def due(self, *, along: bool = False) -> bool:
        """Whether it is to be said now."""
        times, when = self._said
        most = ALONG_SECONDS if along else MOST_SECONDS
        return time.monotonic() - when >= min(FIRST_SECONDS * (1 << max(times - 1, 0)), most)

    def said(self) -> None:
        """Note that it was."""
        self._said = min(self._said[0] + 1, 10), time.monotonic()

    def begin(self) -> None:
        """Begin anew, with something else."""
        self._said = 0, -math.inf
