"""Waiting for a condition, in place of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], *, within: float = 10.0, what: str = "") -> None:
    """Return as soon as `condition()` is true; fail when it is not within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, what or "the condition never became true"
        time.sleep(0.005)
