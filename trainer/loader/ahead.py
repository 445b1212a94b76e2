"""Makes items ahead of their use: by threads, yielded in order, as many as fit into so many bytes.

A channel of the engine (`trainer/engine/channel.py`) keeps the order of its puts; here it is that
of the steps, whichever thread is first. And each step costs a thread one turn with the lock, since
a batch takes no longer than a few such turns to make.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from protocol.errors import UsageError
from trainer.engine.stage import Item, failures_named
from trainer.loader.metrics import LoaderMetrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class Ahead(Generic[T]):
    """Iterates over `make(step)` for each step of a range, in order, whichever thread makes it.

    `make` returns the item and its bytes. `told(step)` says of an item that failed its epoch and
    its samples: the error reaches the caller where the item would have come, with that in it, and
    ends the iteration. What is ready and what is being made is at most `max_bytes`, taking each for
    as large as the largest so far; one item, if it alone is larger.

    As a context, the threads are over when it ends; `close` returns once they are, which takes no
    longer than the items that are being made.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[T, int]],
        steps: range,
        *,
        threads: int,
        max_bytes: int,
        metrics: LoaderMetrics,
        told: Callable[[int], tuple[int, list[str]]],
    ) -> None:
        self._make = make
        self._told = told
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._closed = False
        self._ready: dict[int, tuple[T | _Failed, int]] = {}
        self._ready_bytes = self._largest = 0
        self._begun = self._wanted = steps.start  # the next step to be made, and to be yielded
        self._stop = steps.stop
        self._threads = [
            threading.Thread(target=self._work, name=f"loader-{number}", daemon=True)
            for number in range(min(threads, len(steps)))
        ]

    def __enter__(self) -> Self:
        # A daemon thread that computes while the interpreter goes away takes the process with it.
        atexit.register(self.close)
        self._since = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._metrics.iterated(time.perf_counter() - self._since)

    def close(self) -> None:
        """End the threads; what was made ahead is dropped. May be called from any thread."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            self._closed = True  # the lock may be held by a thread that is not here
            return
        with self._lock:
            self._closed = True
            self._ready.clear()
            self._arrived.notify_all()
            self._room.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def __iter__(self) -> Iterator[T]:
        while self._wanted < self._stop:
            began = time.perf_counter()
            item, occupancy = self._taken()
            self._metrics.waited(time.perf_counter() - began, occupancy)
            if isinstance(item, _Failed):
                raise item.error
            yield item

    def _taken(self) -> tuple[T | _Failed, float]:
        """Return the next item, and how full it was here before."""
        if os.getpid() != self._owner:
            why = "its threads are in another process, from which this one was forked"
            raise UsageError("go on with a loader", why=why, hint="Iterate over it anew here.")
        if not self._threads and not self._closed:
            self._wanted += 1
            return self._outcome(self._wanted - 1)[0], 0.0
        with self._lock:
            occupancy = min(1.0, self._ready_bytes / self._max_bytes)
            while self._wanted not in self._ready and not self._closed:
                self._arrived.wait()
            if self._closed:
                why = "it was closed, or iterated anew"
                raise UsageError("go on with a loader", why=why)
            item, nbytes = self._ready.pop(self._wanted)
            self._wanted += 1
            self._ready_bytes -= nbytes
            self._room.notify()
        return item, occupancy

    def _work(self) -> None:
        made: tuple[int, T | _Failed, int] | None = None
        done = time.perf_counter()
        while (step := self._next_step(made)) is not None:
            began = time.perf_counter()
            made = step, *self._outcome(step)
            blocked, done = began - done, time.perf_counter()
            self._metrics.worked(done - began, blocked)

    def _next_step(self, made: tuple[int, T | _Failed, int] | None) -> int | None:
        """Hand over what was made, and return the next step once there is room; None at the end."""
        with self._lock:
            if made and not self._closed:
                self._put(*made)
            while not self._may_begin():
                if self._closed or self._begun >= self._stop:
                    return None
                self._room.wait()
            self._begun += 1
            if self._may_begin():
                self._room.notify()
            return self._begun - 1

    def _put(self, step: int, item: T | _Failed, nbytes: int) -> None:
        self._ready[step] = item, nbytes
        self._ready_bytes += nbytes
        self._largest = max(self._largest, nbytes)
        if step == self._wanted:
            self._arrived.notify()

    def _may_begin(self) -> bool:
        if self._closed or self._begun >= self._stop:
            return False
        being_made = self._begun - self._wanted - len(self._ready)
        bytes_then = self._ready_bytes + (being_made + 1) * self._largest
        return self._begun == self._wanted or bytes_then <= self._max_bytes

    def _outcome(self, step: int) -> tuple[T | _Failed, int]:
        try:
            return self._made(step)
        except BaseException as error:
            return _Failed(error), 0

    def _made(self, step: int) -> tuple[T, int]:
        try:
            return self._make(step)
        except Exception as error:
            epoch, samples = self._told(step)
            failed: Item[Any] = Item(seq=step, epoch=epoch, payload=None, sample_ids=samples)
            with failures_named("loader", failed):
                raise error
