"""Logits over clips in batches, and what is measured on them.

Arrays: `clips` (n, length) float32, `logits` (n, classes) float32, `targets` (n,) int64 indices
of classes. What is measured is plain numpy on logits, so that torch and ONNX models are judged by
the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from torch import nn

Clips = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64]

BATCH = 256


def batches(count: int, size: int = BATCH) -> Iterator[slice]:
    """Yield slices that cover `count` items, `size` at a time, the last one shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def torch_logits(model: nn.Module, clips: Clips, *, batch_size: int = BATCH) -> Logits:
    """Return the logits of a torch classifier, which is left in evaluation mode, on its device."""
    import torch

    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        parts = [
            model(torch.from_numpy(clips[part]).to(device)).cpu().numpy()
            for part in batches(len(clips), batch_size)
        ]
    return np.concatenate(parts)


def onnx_session(model: bytes, *, threads: int = 1) -> InferenceSession:
    """Load an ONNX model for the CPU, with the given number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def onnx_logits(session: InferenceSession, clips: Clips, *, batch_size: int = BATCH) -> Logits:
    """Return the logits of an ONNX classifier, its only input given by position."""
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: clips[part]})[0] for part in batches(len(clips), batch_size)]
    return np.concatenate(parts)


def accuracy(logits: Logits, targets: Targets) -> float:
    """Return the share of clips whose highest logit is the target's, 0 to 1."""
    return float((logits.argmax(axis=1) == targets).mean())


def macro_accuracy(logits: Logits, targets: Targets) -> float:
    """Return the mean over the classes present of the share found: every class counts alike."""
    right = logits.argmax(axis=1) == targets
    return float(np.mean([right[targets == c].mean() for c in np.unique(targets)]))


def cross_entropy(logits: Logits, targets: Targets) -> float:
    """Return the mean negative log likelihood of the targets, in nats."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return float((log_sum - shifted[np.arange(len(targets)), targets]).mean())


def by_corpus(values: npt.NDArray[np.float64], corpus: npt.NDArray[np.str_]) -> dict[str, float]:
    """Return the mean of `values` (n,) over each corpus (n,), by corpus name in order."""
    return {str(name): float(values[corpus == name].mean()) for name in np.unique(corpus)}
