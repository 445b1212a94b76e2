"""Tests of trainer/devices.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from protocol.errors import UsageError
from trainer.devices import set_up_torch


@pytest.fixture(autouse=True)
def settings_kept() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_torch_is_made_deterministic_with_the_threads_asked_for() -> None:
    assert set_up_torch(device="cpu", threads=2) == torch.device("cpu")
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()


def test_auto_is_a_device_that_is_there() -> None:
    chosen = set_up_torch(device="auto", threads=None)
    assert chosen.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(
        UsageError, match=f"use the device '{device}'.*Choose auto, cpu, cuda or cuda:N"
    ):
        set_up_torch(device=device, threads=None)
