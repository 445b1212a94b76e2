"""Which lines of a queue file are new: `protocol.queue.scan` with a memory.

The last scan is kept in the state. For how long the file has been as it is, is measured here, by
this machine's clock.
"""

from __future__ import annotations

import hashlib
import time

from protocol.queue import ScanDecision, parse_queue, scan
from syncd.state import State


class QueueScan:
    """The scans of one file; `name` is what the last one is called in the state."""

    def __init__(self, state: State, name: str) -> None:
        self._state = state
        self._name = name
        self._digest = b""
        self._unchanged_since = time.monotonic()
        self._counted = False  # whether all that the file says was numbered

    def begin(self, counts: dict[str, int]) -> None:
        """Take these lines, each as often as it is said, for the last scan."""
        self._state.put(self._name, counts)

    def has_begun(self) -> bool:
        """Whether there was a last scan; nothing is new before."""
        return self._state.get(self._name) is not None

    def look(self, data: bytes) -> ScanDecision | None:
        """Return what is to be numbered and kept of the file as it is now, None for nothing."""
        digest, now = hashlib.sha256(data).digest(), time.monotonic()
        if digest != self._digest:
            self._digest, self._unchanged_since = digest, now
            self._counted = False
        last = self._state.get(self._name)
        if self._counted or last is None:
            return None
        decision = scan(last, parse_queue(data), unchanged_for=now - self._unchanged_since)
        if decision.new or decision.counts != last:
            return decision
        self._counted = not decision.settling
        return None

    def is_settling(self) -> bool:
        """Whether time alone may make more of the file count."""
        return not self._counted

    def keep(self, decision: ScanDecision) -> None:
        """Keep a scan, inside the transaction that numbers its lines."""
        self._state.put(self._name, dict(decision.counts))

    def done(self, decision: ScanDecision) -> None:
        """Call it after that transaction: a scan that failed is done again."""
        self._counted = not decision.settling
