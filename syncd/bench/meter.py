"""Counts the bodies of the objects that both ends have put on a remote."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.wire import ObjectName, Writer


def objects_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path and length of each object on a remote that lies on this disk, whole or not."""
    for writer in folder.iterdir():
        if Writer.parse(writer.name) is None:
            continue
        for entry in writer.iterdir():
            name = ObjectName.parse(entry.name)
            if name is not None:
                yield f"{writer.name}/{entry.name}", name.length


class ObjectMeter:
    """Sees every object that is there for so long as it looks `every` so many seconds; many are
    deleted again once a state stands for them. A context manager.

    `look` yields path and length of those that are there now.
    """

    def __init__(
        self, look: Callable[[], Iterator[tuple[str, int]]], *, every: float = 0.5
    ) -> None:
        self._every = every
        self._look = look
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def body_bytes(self) -> int:
        """Return the sum of all bodies so far, those included that were there before."""
        with self._lock:
            self._seen.update(self._look())
            return sum(self._seen.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.body_bytes()
