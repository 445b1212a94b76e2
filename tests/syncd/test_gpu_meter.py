"""How busy the GPUs are, as the status tells it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from waiting import eventually

from syncd import gpu_meter
from syncd.gpu_meter import GpuMeter, shown


@pytest.mark.parametrize(
    ("busy", "used", "text"),
    [
        (0, 0, "0% busy, 0.0 of 16 GiB"),
        (97, 13 * 2**30 + 2**29, "97% busy, 13.5 of 16 GiB"),
        (None, 2**30, "1.0 of 16 GiB"),
    ],
)
def test_a_gpu_is_told_in_a_few_words(busy: int | None, used: int, text: str) -> None:
    assert shown(busy, used, 16 * 2**30) == text


def test_where_there_is_no_driver_nothing_is_told_and_nothing_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    meter = GpuMeter()
    assert meter.shown() == {}
    eventually(lambda: not _measures())
    assert meter.shown() == {}
    assert not _measures()


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(gpu_meter, "read", lambda: hang.wait(30))
    monkeypatch.setattr(gpu_meter, "MEASURE_SECONDS", 0.01)
    monkeypatch.setattr(gpu_meter, "WANTED_SECONDS", 0.2)
    meter = GpuMeter()
    assert meter.shown() == {}
    assert meter.shown() == {}
    hang.set()
    eventually(lambda: not _measures())


def test_it_measures_only_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Any] = [SimpleNamespace(used=2**30, total=2**34)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: handles[handle])
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=50)
    )
    monkeypatch.setattr(gpu_meter, "MEASURE_SECONDS", 0.01)
    monkeypatch.setattr(gpu_meter, "WANTED_SECONDS", 0.2)
    meter = GpuMeter()
    eventually(lambda: meter.shown() == {"GPU 0": "50% busy, 1.0 of 16 GiB"})
    eventually(lambda: not _measures())


def _measures() -> bool:
    return any(thread.name == "gpus" for thread in threading.enumerate())
