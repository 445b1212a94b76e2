"""Which files go next, and how they can still be read when their stage has removed them.

A stage keeps the last few checkpoints and removes the others. Over a slow way one takes longer to
be sent than the next takes to be made; so the newest goes first, alone, and one that was removed
before its turn came is never sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from protocol.checkpoints import CHECKPOINTS, TOGETHER_SECONDS

# So many files are held open at most; the rest are read by their names.
MOST_HELD = 256


class Changed(Protocol):
    """What is known of a file that waits to be sent."""

    @property
    def path(self) -> str: ...

    @property
    def changed_ns(self) -> int: ...


T = TypeVar("T", bound=Changed)


def first_turn(changed: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return what goes now, in order, and what waits until that is there.

    Of each run's checkpoints the newest goes, with what was made along with it; all other files go
    before, as they came.
    """
    newest: dict[str, int] = {}
    for file in changed:
        if run := _run(file):
            newest[run] = max(newest.get(run, 0), file.changed_ns)
    now, later = [file for file in changed if not _run(file)], list[T]()
    for file in sorted(changed, key=lambda file: file.changed_ns):
        if run := _run(file):
            along = newest[run] - file.changed_ns <= TOGETHER_SECONDS * 1e9
            (now if along else later).append(file)
    return now, later


def _run(file: Changed) -> str:
    """Return the run whose checkpoint a file is, or is a part of; "" for any other file."""
    found = file.path.startswith(CHECKPOINTS)
    return file.path.removeprefix(CHECKPOINTS).partition("/")[0] if found else ""


@contextlib.contextmanager
def held(paths: Iterable[Path]) -> Iterator[dict[Path, Path]]:
    """Open files, and yield for each by what path it can be read until the block ends, also if it
    is removed meanwhile, or another one gets its name. What cannot be opened keeps its own path.

    A link would do so too, and would change the time by which a file is told from what it was.
    """
    with contextlib.ExitStack() as opened:
        readable: dict[Path, Path] = {}
        for path in paths:
            readable[path] = path
            if len(readable) <= MOST_HELD:
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    opened.callback(os.close, fd)
                    readable[path] = Path(f"/proc/self/fd/{fd}")
        yield readable
