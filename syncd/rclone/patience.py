"""How long to wait for an answer before asking again by a new connection.

TCP doubles its pauses while packets vanish, so what was asked before a link dropped is answered as
long after the link's return as it was away. What is asked anew is answered at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from syncd.rclone.errors import Transient

# Bytes a second that a transfer is allowed for: a slow link that others use too.
_SLOWEST = 16 * 1024
# What is slower than all that is met by doubling, so often.
_MOST_SCALE = 16.0
# An answer may take so many times as long as the one before.
_FACTOR = 4.0


class Patience:
    """The wait for one remote, from any thread: `least` seconds, and longer where it is slow."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._scale = 1.0

    @contextlib.contextmanager
    def waiting(self, size: int = 0) -> Iterator[float]:
        """Yield how many seconds to wait, for a call that moves `size` bytes, and learn by it.

        A call that took so long and failed (Transient) doubles it; one that succeeded sets it by
        what it took.
        """
        usual = self._least + size / _SLOWEST
        allowed = usual * self._scale
        began = time.monotonic()
        try:
            yield allowed
        except Transient:
            if time.monotonic() - began >= allowed:
                self._set(2 * self._scale)
            raise
        self._set(_FACTOR * (time.monotonic() - began) / usual)

    def _set(self, scale: float) -> None:
        self._scale = min(max(scale, 1.0), _MOST_SCALE)
