"""Where a stage computes, and what makes it compute the same each time."""

from __future__ import annotations

import os

import torch

from protocol.errors import UsageError


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
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(
            f"use the device {device!r}", why=why, hint="Choose auto, cpu or cuda."
        ) from error
    return chosen
