"""Tests of trainer/weights.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from protocol.errors import DataError
from trainer.weights import load_weights, save_weights


def test_weights_come_back_with_their_header(tmp_path: Path) -> None:
    path, module = tmp_path / "w.safetensors", nn.Linear(3, 2)
    save_weights(path, module, {"classes": ["ü"]}, kind="thing", version=2)
    header, state = load_weights(path, kind="thing", version=2)
    assert header == {"version": 2, "classes": ["ü"]}
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("kind", "version"), [("other", 2), ("thing", 1)])
def test_another_kind_or_version_is_refused(tmp_path: Path, kind: str, version: int) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, nn.Linear(3, 2), {}, kind="thing", version=2)
    with pytest.raises(ValueError, match=f"not a {kind} file of version {version}"):
        load_weights(path, kind=kind, version=version)


def test_weights_that_cannot_be_written_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "w.safetensors"
    with pytest.raises(DataError, match=r"write the weights: .*w\.safetensors"):
        save_weights(path, nn.Linear(3, 2), {}, kind="thing", version=2)
