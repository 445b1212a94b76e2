"""Segments of growing files that could not be written when they came, kept until they can be.

One file that cannot be written must not hold up the pack that brings it, and with it everything
else. What waits is bounded: of more than fits in a log's newest part, the oldest go, which shows as
a gap.
"""

from __future__ import annotations

from protocol.messages import Append
from syncd.log_parts import ROTATE_BYTES
from syncd.state import State


class Parked:
    """What waits, by path and in order; in the state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, message: Append) -> None:
        """Keep one more segment. Call it inside a transaction."""
        self._state.run(
            "INSERT INTO parked (path, stream, start, end, data) VALUES (?, ?, ?, ?, ?)",
            message.path,
            message.stream,
            message.start,
            message.end,
            message.blob,
        )
        excess = self.size(message.path) - ROTATE_BYTES
        while excess > 0:
            place, length = self._first(message.path)
            self._state.run("DELETE FROM parked WHERE place = ?", place)
            excess -= length

    def size(self, path: str) -> int:
        """How many bytes of a file wait."""
        row = self._state.row("SELECT SUM(LENGTH(data)) FROM parked WHERE path = ?", path)
        return int(row[0] or 0) if row else 0

    def paths(self) -> list[str]:
        """Files of which something waits."""
        return [path for (path,) in self._state.rows("SELECT DISTINCT path FROM parked")]

    def next(self, path: str) -> Append | None:
        """The first segment of a file that waits, or None."""
        row = self._state.row(
            "SELECT stream, start, end, data FROM parked WHERE path = ? ORDER BY place LIMIT 1",
            path,
        )
        if row is None:
            return None
        return Append(path=path, stream=row[0], start=row[1], end=row[2], blob=bytes(row[3]))

    def drop_next(self, path: str) -> None:
        """Forget the first segment of a file that waits: it is in the file."""
        self._state.run("DELETE FROM parked WHERE place = ?", self._first(path)[0])

    def _first(self, path: str) -> tuple[int, int]:
        row = self._state.row(
            "SELECT place, LENGTH(data) FROM parked WHERE path = ? ORDER BY place LIMIT 1", path
        )
        return (int(row[0]), int(row[1])) if row else (0, 0)
