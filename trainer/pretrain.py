"""Stage `pretrain`: an encoder of clips, learnt without labels by masked reconstruction.

    python -m trainer pretrain --pool pool --output runs

What is learnt and how is in `trainer/reconstruct.py`; here are its configuration, its data, and
what it is measured by.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protocol.results import StageReport
from trainer.config import as_json, require, require_counts, require_seed, require_threads
from trainer.data import ClipSource, Part, learning_parts
from trainer.devices import set_up_torch
from trainer.engine.pipeline import Pipeline
from trainer.engine.stage import Stage
from trainer.hashing import code_hash
from trainer.model import ClipEncoder, EncoderConfig, save_encoder
from trainer.pool.format import Clips, Pool, Rows, open_pool
from trainer.randomness import stream
from trainer.reconstruct import (
    MaskStage,
    Reconstructor,
    ReconstructStage,
    random_masks,
    seeded_model,
)
from trainer.run import Run
from trainer.schedule import warmup_cosine
from trainer.train import Outcome, Plan, curve_artifacts, train

ENCODER = "encoder.safetensors"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """How to pretrain."""

    pool: Path = Path("pool")
    """Folder of the pool."""

    index: Path | None = None
    """Index file of a sample to train on; by default the whole pool."""

    epochs: int = 40
    """Passes over the training clips."""

    batch_size: int = 32
    """Clips in a step."""

    rate: float = 2e-3
    """Peak learning rate, reached after the warm-up."""

    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""

    weight_decay: float = 0.05
    """AdamW's decay of the weight matrices."""

    mask: float = 0.4
    """Share of a clip's patches that is hidden."""

    validation: float = 0.2
    """Share of the training clips that is kept to measure with."""

    checkpoint_every: int = 5
    """Epochs from one checkpoint to the next."""

    seed: int = 0
    """What the initial weights, the order of the clips and the masks follow from."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda or cuda:N."""

    threads: int | None = None
    """CPU threads of torch; by default its own choice."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """The encoder's shape."""

    def __post_init__(self) -> None:
        require_counts("pretrain", self, "epochs", "batch_size", "checkpoint_every")
        require_seed("pretrain", self.seed)
        require_threads("pretrain", self.threads)
        for name in ("mask", "validation"):
            value = getattr(self, name)
            require("pretrain", name, value, holds=0 < value < 1, right="between 0 and 1")
        for name in ("warmup", "weight_decay"):
            value = getattr(self, name)
            require("pretrain", name, value, holds=0 <= value <= 1, right="from 0 to 1")
        holds = 0 < self.rate <= 1
        require("pretrain", "rate", self.rate, holds=holds, right="above 0, at most 1")


class Validation:
    """Measures a model on clips that it does not learn from, with the same masks each time."""

    def __init__(
        self, pool: Pool, rows: Rows, config: PretrainConfig, device: torch.device
    ) -> None:
        self.clips = pool.clips(rows)
        self.mask = random_masks(
            stream(config.seed, "validation-mask"),
            pool.keys[rows],
            config.encoder.patches,
            config.mask,
        )
        self._batch_size = max(config.batch_size, 256)
        self._device = device

    @torch.no_grad()
    def loss(self, model: Reconstructor) -> float:
        """Return the mean squared error of the hidden values."""
        model.eval()
        total = 0.0
        for start in range(0, len(self.clips), self._batch_size):
            part = slice(start, start + self._batch_size)
            clips = torch.from_numpy(self.clips[part]).to(self._device)
            mask = torch.from_numpy(self.mask[part]).to(self._device)
            # Each clip hides as many values, so the mean over clips is the mean over values.
            total += float(model(clips, mask)) * len(clips)
        return total / len(self.clips)

    def baselines(self) -> dict[str, float]:
        """Return the same error for predicting 0, and the mean of what is shown of the clip."""
        patches = self.clips.reshape(*self.mask.shape, -1).astype(np.float64)
        hidden = self.mask[:, :, None]
        values = patches.shape[2]
        shown_mean = (patches * ~hidden).sum((1, 2)) / ((~self.mask).sum(1) * values)
        count = self.mask.sum() * values
        return {
            "validation_loss_predicting_0": float((patches**2 * hidden).sum() / count),
            "validation_loss_predicting_mean": float(
                ((patches - shown_mean[:, None, None]) ** 2 * hidden).sum() / count
            ),
        }


@torch.no_grad()
def embed(encoder: ClipEncoder, clips: Clips, device: torch.device) -> Clips:
    """Return the embeddings (n, D) of clips (n, T), scaled to length 1."""
    encoder.eval()
    parts = [
        encoder.features(torch.from_numpy(clips[start : start + 1024]).to(device)).cpu()
        for start in range(0, len(clips), 1024)
    ]
    embeddings: Clips = nn.functional.normalize(torch.cat(parts), dim=1).numpy()
    return embeddings


def nearest_accuracy(known: Clips, labels: Rows, queries: Clips, truth: Rows) -> float:
    """Return the share of queries (m, D) whose most similar known vector (n, D) has their class.

    A training-free look at what the embeddings know; similarity is the inner product.
    """
    nearest = (queries @ known.T).argmax(axis=1)
    return float((labels[nearest] == truth).mean())


def pretrain(config: PretrainConfig, run: Run) -> StageReport:
    """Pretrain an encoder and publish it; resumes from the run's newest whole checkpoint.

    Raises UsageError for a configuration that does not fit the pool, DataError for a damaged pool
    or a checkpoint of another configuration.
    """
    begin = time.perf_counter()
    device = set_up_torch(device=config.device, threads=config.threads)
    pool = open_pool(config.pool)
    require(
        "pretrain",
        "encoder.length",
        config.encoder.length,
        holds=config.encoder.length == pool.length,
        right=f"{pool.length}, the length of the pool's clips",
    )
    parts = learning_parts(pool, index=config.index, validation_share=config.validation)
    untrained, model = (seeded_model(config.encoder, config.seed, device) for _ in range(2))
    validation = Validation(pool, parts[Part.VALIDATION], config, device)
    outcome = _train(config, run, pool, parts[Part.TRAIN], model, validation, device)

    save_encoder(
        run.artifact_dir / ENCODER,
        model.encoder,
        {"run_id": run.run_id, "stage": run.stage, "pool": pool.content_hash},
    )
    metrics = {
        "validation_loss": outcome.history[-1]["validation/loss"],
        **validation.baselines(),
        **_nearest_metrics(pool, parts, model.encoder, untrained.encoder, device),
    }
    return StageReport(
        run_id=run.run_id,
        stage=run.stage,
        metrics=metrics,
        data_hash=pool.content_hash,
        code_hash=code_hash(),
        config=as_json(config),
        seed=config.seed,
        durations={"train": outcome.seconds, "total": time.perf_counter() - begin},
        artifacts={"encoder": run.artifact(ENCODER), **curve_artifacts(run, run.artifact_dir)},
        detail={
            "clips": {str(part): len(rows) for part, rows in parts.items()},
            "resumed_from": outcome.resumed_from,
            "clocks": outcome.clocks,
        },
    )


def _train(
    config: PretrainConfig,
    run: Run,
    pool: Pool,
    rows: Rows,
    model: Reconstructor,
    validation: Validation,
    device: torch.device,
) -> Outcome:
    source = ClipSource(
        pool, rows, batch_size=config.batch_size, epochs=config.epochs, seed=config.seed
    )
    rate = partial(
        warmup_cosine,
        total=source.steps,
        warmup=round(config.warmup * source.steps),
        peak=config.rate,
    )
    stages: list[Stage[Any, Any]] = [
        MaskStage(
            seed=config.seed,
            patches=config.encoder.patches,
            share=config.mask,
            device=device,
        ),
        ReconstructStage(model, rate, weight_decay=config.weight_decay),
    ]
    plan = Plan(
        checkpoints=run.checkpoint_dir,
        metrics=run.artifact_dir,
        config=as_json(config),
        steps=source.steps,
        epochs=config.epochs,
        checkpoint_every=config.checkpoint_every,
    )
    return train(
        Pipeline(source, stages),
        plan,
        run,
        evaluate=lambda _: {"validation/loss": validation.loss(model)},
        score=lambda values: -values["validation/loss"],
    )


def _nearest_metrics(
    pool: Pool,
    parts: Mapping[Part, Rows],
    encoder: ClipEncoder,
    untrained: ClipEncoder,
    device: torch.device,
) -> dict[str, float]:
    known, queries = parts[Part.TRAIN], parts[Part.VALIDATION]
    labels, truth = pool.class_ids[known], pool.class_ids[queries]
    accuracies = {}
    for name, model in (("", encoder), ("_untrained", untrained)):
        vectors = [embed(model, pool.clips(rows), device) for rows in (known, queries)]
        accuracy = nearest_accuracy(vectors[0], labels, vectors[1], truth)
        accuracies[f"validation_nearest_accuracy{name}"] = accuracy
    return accuracies
