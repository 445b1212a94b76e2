"""The step of fine-tuning, as a stage of the engine: rates, loss, optimiser, the best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer.classifier import Classifier
from trainer.data import ClipBatch
from trainer.engine.stage import Item
from trainer.optimise import decayed_groups, descend
from trainer.pool.format import Rows
from trainer.schedule import Rates


class FinetuneStage:
    """One optimiser step for each batch; its payload is the step's loss and applied rates.

    `class_ids` (rows,) gives the class of each row of the pool; `rates` the learning rates of a
    step. While the encoder's rate is 0 it is frozen: in evaluation mode and without gradients, so
    that nothing moves it, weight decay and the optimiser's moments included.

    The stage also keeps the weights of the best epoch, as part of its state: a resumed run knows
    them too.
    """

    name = "train"

    def __init__(
        self,
        model: Classifier,
        class_ids: Rows,
        rates: Callable[[int], Rates],
        *,
        weight_decay: float,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimiser = torch.optim.AdamW(
            [
                {**group, "name": name}
                for name, part in (("encoder", model.encoder), ("head", model.head))
                for group in decayed_groups(part, weight_decay)
            ]
        )
        self._class_ids = class_ids
        self._rates = rates
        self._device = device
        self._best: dict[str, Tensor] = {}
        self._best_epoch = -1
        self._best_score: tuple[float, ...] = ()

    def process(self, item: Item[ClipBatch]) -> Item[Mapping[str, float]]:
        batch = item.payload
        clips = torch.from_numpy(batch.clips).to(self._device)
        targets = torch.from_numpy(self._class_ids[batch.rows].astype(np.int64)).to(self._device)
        self.apply(self._rates(item.seq))
        loss = functional.cross_entropy(self.model(clips), targets)
        value = descend(loss, self.optimiser)
        # Read back from the optimiser: what was applied, not what was meant.
        applied = {f"train/rate_{g['name']}": float(g["lr"]) for g in self.optimiser.param_groups}
        return item.with_payload({"train/loss": value, **applied})

    def apply(self, rates: Rates) -> None:
        """Set the learning rates; freeze the encoder when its rate is 0, and free it otherwise."""
        frozen = rates.encoder == 0.0
        self.model.train()
        self.model.encoder.train(not frozen)
        self.model.encoder.requires_grad_(not frozen)
        for group in self.optimiser.param_groups:
            group["lr"] = getattr(rates, group["name"])

    def keep_if_best(self, epoch: int, score: tuple[float, ...]) -> None:
        """Keep the present weights if `score`, in order of weight, is above all before it."""
        if score > self._best_score:
            self._best_epoch, self._best_score = epoch, score
            self._best = {n: v.detach().cpu().clone() for n, v in self.model.state_dict().items()}

    def restore_best(self) -> int:
        """Put the weights of the best epoch into the model; return that epoch."""
        self.model.load_state_dict(self._best)
        return self._best_epoch

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "best": self._best,
            "best_epoch": self._best_epoch,
            "best_score": list(self._best_score),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self._best = dict(state["best"])
        self._best_epoch = int(state["best_epoch"])
        self._best_score = tuple(state["best_score"])

    def close(self) -> None:
        return None
