"""Where a stage computes, and what makes it compute the same each time."""

from __future__ import annotations

import os
import re

import torch

from protocol.errors import UsageError

_DEVICE = re.compile(r"(cpu|cuda)(:[0-9]{1,3})?\Z")


def set_up_torch(*, device: str, threads: int | None) -> torch.device:
    """Choose the device ("auto", "cpu", "cuda", "cuda:1", ...), and make torch deterministic.

    `threads` is the CPU thread count, None for torch's own choice; results on a CPU are equal bit
    for bit between runs with the same count. Settings are the process'. Raises UsageError when
    there is no such device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    # cuBLAS is deterministic only with a fixed workspace (CUDA toolkit, "Results
    # reproducibility"), and reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    what, hint = f"use the device {device!r}", "Choose auto, cpu, cuda or cuda:N."
    if not _DEVICE.match(device):
        raise UsageError(what, why="not a kind of device that this program trains on", hint=hint)
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(what, why=str(error).splitlines()[0], hint=hint) from error
    return chosen
