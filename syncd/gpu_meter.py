"""How busy the GPUs are, by NVML, for the status.

Asked in a thread of its own, since a driver that hangs, as one does when a GPU falls off the bus,
must not take the daemon along; and only while somebody wants to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pynvml

MEASURE_SECONDS = 5.0
WANTED_SECONDS = 15.0


class GpuMeter:
    """Measures while it is looked at. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: Mapping[str, str] = {}
        self._wanted_until = 0.0
        self._thread: threading.Thread | None = None

    def shown(self) -> Mapping[str, str]:
        """Return what was measured last, for each GPU by its name in the status; {} without any.

        Has it measured again for a while, and does not wait for that.
        """
        with self._lock:
            self._wanted_until = time.monotonic() + WANTED_SECONDS
            if self._thread is None:
                self._thread = threading.Thread(target=self._measure, name="gpus", daemon=True)
                self._thread.start()
            return self._shown

    def _measure(self) -> None:
        try:
            pynvml.nvmlInit()
            while time.monotonic() < self._wanted_until:
                self._shown = read()
                time.sleep(MEASURE_SECONDS)
        except pynvml.NVMLError:
            # No GPU of NVIDIA's, or no driver for it: there is nothing to be measured here.
            self._shown = {}
            return
        with self._lock:
            self._shown, self._thread = {}, None


def read() -> dict[str, str]:
    """Ask NVML, which must be initialised, once. Raises NVMLError."""
    found: dict[str, str] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except pynvml.NVMLError:  # a part of a GPU (MIG) does not tell
            busy = None
        found[f"GPU {index}"] = shown(busy, memory.used, memory.total)
    return found


def shown(busy: int | None, used: int, total: int) -> str:
    """Return how a GPU is in a few words: `busy` in percent of the time, the rest in bytes."""
    text = f"{used / 2**30:.1f} of {total / 2**30:.0f} GiB"
    return text if busy is None else f"{busy}% busy, {text}"
