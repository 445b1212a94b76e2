"""One step of gradient descent, the same for every stage that trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from protocol.errors import RunFailedError

GRADIENT_NORM = 1.0


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimiser groups in which matrices are decayed; biases, norms and tokens are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def descend(loss: Tensor, optimiser: torch.optim.Optimizer) -> float:
    """Step the optimiser down the gradient of `loss`, a scalar; return the loss.

    The gradient of all parameters together is cut to a norm of 1. Raises RunFailedError, before
    anything has moved, when the loss is not finite.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise RunFailedError(
            "train", why=f"the loss is {value}", hint="Start a new run with a lower rate."
        )
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
    optimiser.step()
    return value
