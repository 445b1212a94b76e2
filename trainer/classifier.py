"""The classifier: an encoder with a linear head over joint classes, and its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from protocol.errors import DataError
from protocol.schema import decode
from trainer.model import ClipEncoder, EncoderConfig
from trainer.weights import load_weights, save_weights

FORMAT = "clip-classifier"
VERSION = 1


class Classifier(nn.Module):
    """Clips (B, T) float32 to logits (B, C); `classes` are `corpus/label`, in their order.

    The head is a linear layer that starts at zero, so that at first every class is as likely.
    """

    def __init__(self, encoder: ClipEncoder, classes: tuple[str, ...]) -> None:
        super().__init__()
        self.encoder = encoder
        self.classes = classes
        self.head = nn.Linear(encoder.config.width, len(classes))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder.features(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What the file's header says beside the tensors."""

    encoder: EncoderConfig
    classes: tuple[str, ...]
    meta: Mapping[str, Any]


def save_classifier(path: Path, model: Classifier, meta: Mapping[str, Any]) -> None:
    """Publish the weights as safetensors; configuration, classes and `meta` go in its header.

    The same classifier and `meta` give the same bytes.
    """
    header = _Header(encoder=model.encoder.config, classes=model.classes, meta=meta)
    save_weights(path, model, dataclasses.asdict(header), kind=FORMAT, version=VERSION)


def load_classifier(path: Path) -> tuple[Classifier, Mapping[str, Any]]:
    """Read a classifier that `save_classifier` wrote, on the CPU, with its `meta`.

    Raises DataError when the file is missing, cut short, or is no classifier of this version.
    """
    try:
        told, tensors = load_weights(path, kind=FORMAT, version=VERSION)
        header = decode(_Header, told)
        model = Classifier(ClipEncoder(header.encoder), header.classes)
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            "read the classifier",
            path=path,
            why=str(error).splitlines()[0],
            hint="Run `trainer finetune` again, or fetch the file again.",
        ) from error
    return model, header.meta
