"""A module's weights as safetensors, with one JSON object in the file's header.

    {"<format>": {"version": 1, ...}}

The same weights and header give the same bytes on every machine: safetensors writes several
entries of metadata in an order that differs from run to run, so everything stands in one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialise
from torch import nn

from protocol.publish import publish_bytes
from trainer.files import writing


def save_weights(
    path: Path, module: nn.Module, header: Mapping[str, Any], *, kind: str, version: int
) -> None:
    """Publish a module's state as `kind`; `header` is JSON.

    Raises DataError when the file cannot be written, ValueError for NaN and infinities in the
    header.
    """
    tensors = {n: v.detach().cpu().contiguous() for n, v in module.state_dict().items()}
    text = json.dumps({"version": version, **header}, sort_keys=True, allow_nan=False)
    with writing("write the weights", path):
        publish_bytes(path, serialise(tensors, {kind: text}))


def load_weights(
    path: Path, *, kind: str, version: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read what `save_weights` wrote: the header, and the state on the CPU.

    Raises OSError, SafetensorError, or ValueError when it is no file of this kind and version.
    """
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {}).get(kind, "{}"))
        if header.get("version") != version:
            raise ValueError(f"not a {kind} file of version {version}")
        # The handle has keys but cannot be iterated over.
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
