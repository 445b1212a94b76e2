"""Waiting for a condition, in place of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from syncd.rclone.errors import Transient

T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None], *, within: float = 10.0, what: str | Callable[[], str] = ""
) -> T:
    """Return `condition()` as soon as it is true; fail when it is not within so many seconds."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(told or "the condition never became true")
        time.sleep(0.005)
    return found


def tried_until(action: Callable[[], T], *, within: float = 30.0) -> T:
    """Return what `action` returns, as soon as it raises Transient no more."""
    deadline = time.monotonic() + within
    while True:
        try:
            return action()
        except Transient:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
