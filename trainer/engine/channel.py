"""A channel: the bounded queue between two stages, which knows how full it is.

It is bounded by bytes, because batches differ in size, and by items. An item larger than the
bound passes when the channel is empty, rather than never. Occupancy near 0 says that the stages
behind the channel wait for those before it; near 1, the other way round.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.errors import UsageError

T = TypeVar("T")


class ChannelClosedError(Exception):
    """The channel is closed, and on the getting side also empty: the orderly end."""


class ChannelTimeoutError(Exception):
    """Nothing came, or no room was made, in the time given."""


class CancelledError(Exception):
    """The pipeline was cancelled; the first failure is chained as the cause."""


class Cancellation:
    """A token that every stage and channel of a pipeline shares.

    The first `cancel` counts: its error is what everyone who waits is woken with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self._cancelled = False
        self.error: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self, error: BaseException | None = None) -> bool:
        """Cancel, because of `error`; return whether this was the first call."""
        with self._lock:
            if self._cancelled:
                return False
            self.error = error
            self._cancelled = True
            wake = list(self._wake)
        for call in wake:
            call()
        return True

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Have `call` called, once, when the token is cancelled; at once if it is already."""
        with self._lock:
            if not self._cancelled:
                self._wake.append(call)
                return
        call()

    def check(self) -> None:
        """Raise CancelledError, with the first failure as its cause, if cancelled."""
        if self._cancelled:
            raise CancelledError("the pipeline was cancelled") from self.error


class Channel(Generic[T]):
    """A first-in, first-out queue between threads, bounded by `max_bytes` and `max_items`."""

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int,
        max_items: int = 1 << 30,
        cancellation: Cancellation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for field, value in (("max_bytes", max_bytes), ("max_items", max_items)):
            if value < 1:
                why = f"{field} is {value}; it must be at least 1"
                raise UsageError(f"make the channel {name!r}", why=why)
        self.name = name
        self.max_bytes = max_bytes
        self.max_items = max_items
        self._cancellation = cancellation or Cancellation()
        self._condition = threading.Condition()
        self._items: deque[tuple[T, int]] = deque()
        self._closed = False
        self._bytes = 0
        self._high_water = 0
        self._clock = clock
        self._made = self._changed = clock()
        self._area = 0.0
        self._cancellation.on_cancel(self._notify)

    def put(self, item: T, nbytes: int, *, timeout: float | None = None) -> None:
        """Add an item of `nbytes`, waiting for room.

        Raises ChannelTimeoutError after `timeout` seconds, ChannelClosedError when the channel is
        or becomes closed, CancelledError when the pipeline is or becomes cancelled.
        """
        with self._condition:
            self._wait(lambda: self._closed or self._fits(nbytes), timeout, "put")
            if self._closed:
                raise ChannelClosedError(self.name)
            self._account()
            self._items.append((item, nbytes))
            self._bytes += nbytes
            self._high_water = max(self._high_water, self._bytes)
            self._condition.notify_all()

    def get(self, *, timeout: float | None = None) -> T:
        """Take the oldest item, waiting for one.

        Raises ChannelClosedError when the channel is closed and what was in it is taken, and else
        as `put` does.
        """
        with self._condition:
            self._wait(lambda: self._closed or bool(self._items), timeout, "get")
            if not self._items:
                raise ChannelClosedError(self.name)
            self._account()
            item, nbytes = self._items.popleft()
            self._bytes -= nbytes
            self._condition.notify_all()
            return item

    def close(self) -> None:
        """Say that nothing more comes: puts fail from now on, gets once the rest is taken."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def __len__(self) -> int:
        with self._condition:
            return len(self._items)

    @property
    def nbytes(self) -> int:
        """Bytes in the channel now."""
        with self._condition:
            return self._bytes

    @property
    def high_water(self) -> int:
        """The most bytes that were ever in the channel."""
        with self._condition:
            return self._high_water

    @property
    def occupancy(self) -> float:
        """The fill now, 0 to 1: of the bytes or of the items, whichever is nearer its bound."""
        with self._condition:
            return self._fill()

    @property
    def mean_occupancy(self) -> float:
        """The fill averaged over the time since the channel was made, 0 to 1."""
        with self._condition:
            self._account()
            lived = self._changed - self._made
            return self._area / lived if lived > 0 else self._fill()

    def _fits(self, nbytes: int) -> bool:
        if not self._items:
            return True
        return len(self._items) < self.max_items and self._bytes + nbytes <= self.max_bytes

    def _fill(self) -> float:
        return min(1.0, max(self._bytes / self.max_bytes, len(self._items) / self.max_items))

    def _account(self) -> None:
        now = self._clock()
        self._area += self._fill() * (now - self._changed)
        self._changed = now

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._condition.wait_for(lambda: self._cancellation.cancelled or ready(), timeout)
        self._cancellation.check()
        if not ready():
            raise ChannelTimeoutError(f"{what} on the channel {self.name!r} after {timeout} s")

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
