"""What a loader did with its time, and what its batches were: which side waits for the other."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Any

from trainer.loader.batch import Batch


class Bottleneck(StrEnum):
    """Who waits for whom."""

    NONE = "none"  # nothing was loaded yet
    LOADER = "loader"  # the consumer starves: its batches do not come fast enough
    CONSUMER = "consumer"  # the threads are blocked: there is no room for more batches


class LoaderMetrics:
    """Counts since the loader was made. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = self._taken = self._samples = self._tokens = self._slots = self._bytes = 0
        self._busy = self._blocked = self._starved = self._elapsed = self._occupancy = 0.0

    def __reduce__(self) -> tuple[type[LoaderMetrics], tuple[()]]:
        """Begin anew in another process."""
        return LoaderMetrics, ()

    def count(self, batch: Batch, slots: int, nbytes: int) -> None:
        """Count a batch that was made, with room for so many values a column."""
        with self._lock:
            self._batches += 1
            self._samples += len(batch.rows)
            self._tokens += batch.tokens
            self._slots += slots
            self._bytes += nbytes

    def worked(self, busy: float, blocked: float) -> None:
        """Count a thread's seconds with one batch: to make it, and until there was room for it."""
        with self._lock:
            self._busy += busy
            self._blocked += blocked

    def waited(self, starved: float, occupancy: float) -> None:
        """Count the seconds that the consumer waited for one batch; the channel is so full then."""
        with self._lock:
            self._taken += 1
            self._starved += starved
            self._occupancy += occupancy

    def iterated(self, seconds: float) -> None:
        """Count the seconds of an iteration, from its begin to its end."""
        with self._lock:
            self._elapsed += seconds

    def report(self) -> dict[str, Any]:
        """Return what was counted:

        `batches`, `samples`, `tokens` and `bytes` made; `padding`, the share of slots that hold no
        value of a row; `us_a_sample`, microseconds of a thread; `busy_s` and `blocked_s` of the
        threads, `starved_s` of the consumer, out of `elapsed_s` in iterations that have ended;
        `occupancy`, 0 to 1, the channel's mean fill when a batch is taken (near 0: the consumer
        waits for the threads; near 1: they wait for it); and the `bottleneck`.
        """
        with self._lock:
            return {
                "batches": self._batches,
                "samples": self._samples,
                "tokens": self._tokens,
                "bytes": self._bytes,
                "padding": 1 - self._tokens / self._slots if self._slots else 0.0,
                "us_a_sample": self._busy / self._samples * 1e6 if self._samples else 0.0,
                "busy_s": self._busy,
                "blocked_s": self._blocked,
                "starved_s": self._starved,
                "elapsed_s": self._elapsed,
                "occupancy": self._occupancy / self._taken if self._taken else 0.0,
                "bottleneck": str(self._bottleneck()),
            }

    def _bottleneck(self) -> Bottleneck:
        if not self._taken:
            return Bottleneck.NONE
        return Bottleneck.LOADER if self._starved > self._blocked else Bottleneck.CONSUMER
