"""How long a consumer waits for its batches when it takes 5 ms itself for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from protocol.bench import Figure
from trainer.bench.batches import BUDGET
from trainer.bench.interleaved import medians
from trainer.loader import Loader, Padded
from trainer.loader.rows import Rows as Source

STEP_S = 0.005
WARM = 20
TIMED = 200
ROUNDS = 3


def _asleep() -> None:
    """Take a step as a GPU does: this thread waits, and the cores are free."""
    time.sleep(STEP_S)


def _busy() -> None:
    """Take a step in Python: a core is taken, and the interpreter's lock with it."""
    end = time.perf_counter() + STEP_S
    while time.perf_counter() < end:
        pass


def waiting(source: Source) -> list[Figure]:
    """Return the share of its time that the consumer waits, in percent."""
    steps = {"on a device": _asleep, "in Python": _busy}
    found = medians({name: _share(source, step) for name, step in steps.items()}, ROUNDS)
    return [
        Figure(
            name=f"wait: a consumer of 5 ms a batch, {name}",
            value=share * 100,
            unit="%",
            goal="< 1" if name == "on a device" else "",
        )
        for name, share in found.items()
    ]


def _share(source: Source, step: Callable[[], None]) -> Callable[[], float]:
    def measured() -> float:
        loader = Loader(source, Padded(budget=BUDGET), preload=False)  # it is in memory
        batches = iter(loader)
        waited = 0.0
        try:
            for _ in islice(batches, WARM):
                step()
            start = last = time.perf_counter()
            for _ in islice(batches, min(TIMED, len(loader) - WARM)):
                waited += time.perf_counter() - last
                step()
                last = time.perf_counter()
            return waited / (last - start)
        finally:
            loader.close()

    return measured
