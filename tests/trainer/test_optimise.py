"""Tests of trainer/optimise.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protocol.errors import RunFailedError
from trainer.optimise import GRADIENT_NORM, decayed_groups, descend


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decayed, plain = decayed_groups(model, 0.1)
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_frozen_parameter_is_in_no_group() -> None:
    model = nn.Linear(3, 4)
    model.weight.requires_grad_(False)
    assert [len(group["params"]) for group in decayed_groups(model, 0.1)] == [0, 1]


def test_a_step_follows_the_gradient_cut_to_its_norm() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    assert descend(100 * (weight @ weight), optimiser) == 2500.0
    moved = torch.tensor([3.0, 4.0]) - weight.detach()
    torch.testing.assert_close(moved, GRADIENT_NORM * torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_moves_nothing(bad: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    with pytest.raises(RunFailedError, match=f"the loss is {bad}.*lower rate"):
        descend((weight * bad).sum(), torch.optim.SGD([weight], lr=1.0))
    assert weight.item() == 1.0
