"""A crash in the middle of a transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from syncd.state import State


class CrashError(Exception):
    pass


@contextlib.contextmanager
def taken_back(state: State) -> Iterator[None]:
    """Do what is inside in a transaction that is taken back at its end, as by a crash."""
    with contextlib.suppress(CrashError), state.transaction():
        yield
        raise CrashError
