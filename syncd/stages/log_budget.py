"""What a log may take of the disk while its stage writes it.

The stage writes straight into the log, so the log cannot be renamed under it. Instead its oldest
bytes are freed in place (`syncd.holes`), after those of the part before it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from syncd.holes import STEP, data_from, free_until
from syncd.log_parts import LOG_BUDGET, rotated


class LogBudget:
    """Keeps the log `path`, open as `fd`, and the part before it within `budget` bytes.

    At least the newest `budget` less 2 STEP bytes stay.
    """

    def __init__(self, path: Path, fd: int, *, budget: int = LOG_BUDGET) -> None:
        self._fd = fd
        self._before = rotated(path)
        self._goal = budget - STEP  # a step less, so that it is not done for every few bytes
        self._budget = budget
        self._freed = data_from(fd, 0)
        self._older = self._shrink_before(0)

    def keep(self) -> None:
        """Free the oldest bytes if there are more than the budget; one fstat if there are not.

        Where that cannot be done the log grows on, which the worker's status tells.
        """
        with contextlib.suppress(OSError):
            self._keep()

    def _keep(self) -> None:
        size = os.fstat(self._fd).st_size
        self._freed = min(self._freed, size)  # somebody may have cut it
        held = size - self._freed
        if self._older + held <= self._budget:
            return
        if self._older:
            self._older = self._shrink_before(self._older + held - self._goal)
        self._freed = _shrink(self._fd, size, self._freed, self._older + held - self._goal)

    def _shrink_before(self, excess: int) -> int:
        """Free so many bytes of the part before; return how many it then holds."""
        try:
            fd = os.open(self._before, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # there is none
            return 0
        try:
            size = os.fstat(fd).st_size
            return size - _shrink(fd, size, data_from(fd, 0), excess)
        finally:
            os.close(fd)


def _shrink(fd: int, size: int, freed: int, excess: int) -> int:
    """Free `excess` bytes, of which the first `freed` are free; return how many then are."""
    end = min(freed + excess, size) // STEP * STEP
    if end <= freed:
        return freed
    free_until(fd, end)
    return end
