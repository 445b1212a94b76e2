"""Masked reconstruction: the model, what is hidden of a clip, and the two stages of a step.

Patches of a clip are hidden at random, and the mean squared error of their reconstruction is
minimised over the hidden ones alone: Nie et al. 2023 (PatchTST, arXiv 2211.14730, section 3.2),
after He et al. 2022 (MAE, arXiv 2111.06377). A hidden patch is a learnt token and the decoder one
linear layer, as in Xie et al. 2022 (SimMIM, arXiv 2111.09886).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.data import ClipBatch
from trainer.engine.stage import Item, Stateless
from trainer.model import ClipEncoder, EncoderConfig
from trainer.optimise import decayed_groups, descend
from trainer.randomness import Words, stream, uniform


class Reconstructor(nn.Module):
    """The encoder with the linear layer that predicts a patch's values from its token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = ClipEncoder(config)
        self.decode = nn.Linear(config.width, config.patch)

    def forward(self, clips: Tensor, mask: Tensor) -> Tensor:
        """Return the squared error of each hidden value's reconstruction, averaged: a scalar.

        `clips` (B, T) float32; `mask` (B, N) bool, true where the patch is hidden.
        """
        predicted = self.decode(self.encoder.tokens(clips, mask))
        squared = (predicted - self.encoder.patchify(clips)) ** 2
        # A mean with weights and not an indexed one: the same shapes at every step.
        weight = mask.unsqueeze(-1).to(squared.dtype)
        mean: Tensor = (squared * weight).sum() / (weight.sum() * squared.shape[-1])
        return mean


def seeded_model(config: EncoderConfig, seed: int, device: torch.device) -> Reconstructor:
    """Return an untrained model whose weights are a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Reconstructor(config).to(device)


def random_masks(key: np.uint64, samples: Words, patches: int, share: float) -> NDArray[np.bool_]:
    """Return masks (n, patches) that hide the same number of patches of each sample.

    At least one patch is hidden, and one is shown. Which ones is a function of the stream `key`
    and the sample's key.
    """
    count = min(max(round(share * patches), 1), patches - 1)
    ranks = uniform(key, samples, patches).argsort(axis=1, kind="stable").argsort(axis=1)
    hidden: NDArray[np.bool_] = ranks < count
    return hidden


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    """Clips (B, T) float32 and masks (B, N) bool, on the device that trains."""

    clips: Tensor
    mask: Tensor


class MaskStage(Stateless):
    """Chooses what to hide of each clip, by (seed, epoch, clip), and moves both to the device."""

    name = "mask"

    def __init__(self, *, seed: int, patches: int, share: float, device: torch.device) -> None:
        self._seed = seed
        self._patches = patches
        self._share = share
        self._device = device

    def process(self, item: Item[ClipBatch]) -> Item[MaskedBatch]:
        key = stream(self._seed, "mask", item.epoch)
        mask = random_masks(key, item.payload.keys, self._patches, self._share)
        batch = MaskedBatch(
            clips=torch.from_numpy(item.payload.clips).to(self._device),
            mask=torch.from_numpy(mask).to(self._device),
        )
        return item.with_payload(batch, nbytes=batch.clips.nbytes + batch.mask.nbytes)


class ReconstructStage:
    """One optimiser step for each batch; its payload is the step's loss and learning rate.

    `rate` gives the learning rate of a step.
    """

    name = "train"

    def __init__(
        self, model: Reconstructor, rate: Callable[[int], float], *, weight_decay: float
    ) -> None:
        self._model = model
        self._rate = rate
        self._optimiser = torch.optim.AdamW(decayed_groups(model, weight_decay))

    def process(self, item: Item[MaskedBatch]) -> Item[Mapping[str, float]]:
        rate = self._rate(item.seq)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._model.train()
        loss = descend(self._model(item.payload.clips, item.payload.mask), self._optimiser)
        return item.with_payload({"train/loss": loss, "train/rate": rate})

    def state_dict(self) -> Mapping[str, Any]:
        return {"model": self._model.state_dict(), "optimiser": self._optimiser.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])

    def close(self) -> None:
        return None
