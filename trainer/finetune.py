"""Stage `finetune`: a classifier over joint `corpus/label` classes, from a pretrained encoder.

Two arms, each a run of its own (`<run id>.<arm>`) with checkpoints, metrics and artefacts:

    full     encoder and head learn together from the first step
    lp-ft    first the head alone (linear probe), then both: Kumar et al. 2022, "Fine-tuning can
             distort pretrained features and underperform out-of-distribution", arXiv 2202.10054

    <artifact dir>/<arm>/classifier.safetensors   weights of the best epoch by validation
    <artifact dir>/<arm>/                         metrics.jsonl and TensorBoard event files

    python -m trainer finetune --pool pool --output runs --arm lp-ft
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocol.names import RunId
from protocol.results import StageReport
from trainer.base import Base, BaseEncoder, load_base
from trainer.classifier import Classifier, save_classifier
from trainer.config import as_json, require
from trainer.data import ClipSource, Part, split_indices
from trainer.devices import set_up_torch
from trainer.engine.pipeline import Pipeline
from trainer.evaluate import (
    Logits,
    accuracy,
    by_corpus,
    cross_entropy,
    macro_accuracy,
    torch_logits,
)
from trainer.finetune_stage import FinetuneStage
from trainer.hashing import code_hash
from trainer.pool.format import Pool, Rows, open_pool
from trainer.pool.sample import read_index
from trainer.run import Run
from trainer.schedule import Rates, lp_ft_rates
from trainer.train import Outcome, Plan, curve_artifacts, train

CLASSIFIER = "classifier.safetensors"
RANKED_BY = ("validation_accuracy", "validation_macro_accuracy")


class Arm(StrEnum):
    """A way to fine-tune."""

    FULL = "full"
    LP_FT = "lp-ft"
    ALL = "all"  # each of the others


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How to fine-tune."""

    pool: Path = Path("pool")
    """Folder of the pool."""

    index: Path | None = None
    """Index file of a sample of the pool; only its clips are learnt from."""

    arm: tuple[Arm, ...] = (Arm.ALL,)
    """Arm to run; may be given several times."""

    base: Base = Base.PRETRAIN
    """Where the encoder comes from: a pretraining run, the champion's bundle, or nothing."""

    from_run: str | None = None
    """The pretraining run to start from; by default the newest one."""

    epochs: int = 40
    """Epochs of each arm, the probe's included."""

    probe_epochs: int = 10
    """Of these, the epochs in which lp-ft trains the head alone."""

    batch_size: int = 32
    """Clips a step."""

    rate: float = 3e-3
    """Peak learning rate of encoder and head."""

    probe_rate: float = 1e-2
    """Peak learning rate of the head in the probe."""

    warmup: float = 0.1
    """Share of a phase's steps in which its rate rises."""

    weight_decay: float = 0.05
    """AdamW's decay of matrices."""

    validation: float = 0.2
    """Share of the training clips that is kept to choose the best epoch and arm by."""

    checkpoint_every: int = 5
    """Epochs from one checkpoint to the next."""

    seed: int = 0
    """Decides the order of the clips, and an untrained encoder's weights."""

    device: str = "auto"
    """Device to train on: auto, cpu, cuda, cuda:1, ..."""

    threads: int | None = None
    """Torch's CPU threads; by default its own choice."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "checkpoint_every", "probe_epochs"):
            value = getattr(self, name)
            require("finetune", name, value, holds=value >= 1, right="at least 1")
        for name in ("rate", "probe_rate"):
            value = getattr(self, name)
            require("finetune", name, value, holds=value > 0, right="above 0")
        checks = {
            "probe_epochs": (self.probe_epochs < self.epochs, "less than epochs"),
            "arm": (bool(self.arm), "one arm or more"),
            "warmup": (0 <= self.warmup <= 1, "from 0 to 1"),
            "validation": (0 < self.validation < 1, "between 0 and 1"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "threads": (self.threads is None or self.threads >= 1, "at least 1"),
        }
        for name, (holds, right) in checks.items():
            require("finetune", name, getattr(self, name), holds=holds, right=right)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms to run, each once."""
        every = (Arm.FULL, Arm.LP_FT)
        return every if Arm.ALL in self.arm else tuple(a for a in every if a in self.arm)


def finetune(config: FinetuneConfig, run: Run) -> StageReport:
    """Fine-tune each arm; return a report whose metrics are those of the best arm.

    Resumes each arm from its newest whole checkpoint. Raises UsageError for a configuration that
    does not fit the pool or the base, DataError for a damaged pool, base or checkpoint.
    """
    device = set_up_torch(device=config.device, threads=config.threads)
    pool = open_pool(config.pool)
    index = None if config.index is None else read_index(config.index, pool)
    parts = {
        part: split_indices(pool, part, index=index, validation_share=config.validation)
        for part in (Part.TRAIN, Part.VALIDATION)
    }
    base = load_base(
        config.base, run, length=pool.length, seed=config.seed, from_run=config.from_run
    )
    task = _Task(config=config, run=run, pool=pool, parts=parts, base=base, device=device)
    arms = {str(arm): _finetune_arm(task, arm) for arm in config.arms}
    best = best_arm(arms)
    return replace(
        best,
        run_id=run.run_id,
        config=as_json(config),
        durations={name: report.durations["train"] for name, report in arms.items()},
        artifacts={
            f"{name}/{role}": artifact
            for name, report in arms.items()
            for role, artifact in report.artifacts.items()
        },
        detail={"best_arm": RunId.parse(best.run_id).arm},
        arms=arms,
    )


def best_arm(arms: Mapping[str, StageReport]) -> StageReport:
    """Return the arm of highest validation accuracy, then class-balanced accuracy, then name."""
    names = sorted(arms)
    return arms[max(names, key=lambda name: [arms[name].metrics[metric] for metric in RANKED_BY])]


def arm_rates(config: FinetuneConfig, arm: Arm, steps_per_epoch: int) -> Callable[[int], Rates]:
    """Return the learning rates of an arm as a function of the step; `full` has no probe."""
    probe = config.probe_epochs * steps_per_epoch if arm is Arm.LP_FT else 0
    total = config.epochs * steps_per_epoch
    return lambda step: lp_ft_rates(
        step,
        probe_steps=probe,
        total_steps=total,
        warmup=round(config.warmup * (probe if step < probe else total - probe)),
        probe_peak=config.probe_rate,
        head_peak=config.rate,
        encoder_peak=config.rate,
    )


class Validation:
    """Measures a classifier on the clips that it does not learn from."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self.clips = pool.clips(rows)
        self.targets = pool.class_ids[rows]
        self.corpus = pool.corpus[rows]

    def measure(self, model: Classifier) -> dict[str, float]:
        """Return accuracy, accuracy with every class counting alike, and cross-entropy."""
        return self._measure(torch_logits(model, self.clips))

    def report(self, model: Classifier) -> dict[str, float]:
        """Return the same and the accuracy by corpus, named as in a stage's report."""
        logits = torch_logits(model, self.clips)
        right = (logits.argmax(axis=1) == self.targets).astype(np.float64)
        corpora = by_corpus(right, self.corpus)
        return {
            **{f"validation_{name}": value for name, value in self._measure(logits).items()},
            **{f"validation_accuracy/{name}": value for name, value in corpora.items()},
        }

    def _measure(self, logits: Logits) -> dict[str, float]:
        return {
            "accuracy": accuracy(logits, self.targets),
            "macro_accuracy": macro_accuracy(logits, self.targets),
            "loss": cross_entropy(logits, self.targets),
        }


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What the arms of a run have in common."""

    config: FinetuneConfig
    run: Run
    pool: Pool
    parts: Mapping[Part, Rows]
    base: BaseEncoder
    device: torch.device


def _finetune_arm(task: _Task, arm: Arm) -> StageReport:
    run, pool = task.run, task.pool
    model = Classifier(copy.deepcopy(task.base.encoder), pool.classes).to(task.device)
    # What makes a checkpoint this arm's: its settings, and the encoder that it started from.
    # As plain strings, since a checkpoint is read without our classes.
    written = as_json(task.config) | {
        "arm": str(arm),
        "base": str(task.config.base),
        "inputs": dict(task.base.inputs),
    }
    validation = Validation(pool, task.parts[Part.VALIDATION])
    outcome, epoch = _train(task, arm, model, written, validation)

    run_id = str(replace(RunId.parse(run.run_id), arm=str(arm)))
    name = f"{arm}/{CLASSIFIER}"
    save_classifier(run.artifact_dir / name, model, {"run_id": run_id, "pool": pool.content_hash})
    return StageReport(
        run_id=run_id,
        stage=run.stage,
        metrics={**validation.report(model), "best_epoch": float(epoch)},
        data_hash=pool.content_hash,
        code_hash=code_hash(),
        config=written,
        seed=task.config.seed,
        durations={"train": outcome.seconds},
        artifacts={
            "classifier": run.artifact(name),
            **curve_artifacts(run, run.artifact_dir / arm),
        },
        inputs=task.base.inputs,
        detail={
            "clips": {str(part): len(rows) for part, rows in task.parts.items()},
            "resumed_from": outcome.resumed_from,
            "clocks": outcome.clocks,
        },
    )


def _train(
    task: _Task, arm: Arm, model: Classifier, written: Mapping[str, Any], validation: Validation
) -> tuple[Outcome, int]:
    """Train the arm and put its best epoch's weights into `model`; return that epoch too."""
    config = task.config
    source = ClipSource(
        task.pool,
        task.parts[Part.TRAIN],
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=config.seed,
    )
    stage = FinetuneStage(
        model,
        task.pool.class_ids,
        arm_rates(config, arm, source.steps_per_epoch),
        weight_decay=config.weight_decay,
        device=task.device,
    )

    def evaluate(epoch: int) -> Mapping[str, float]:
        values = validation.measure(model)
        # Few clips make many ties; the later criteria decide them.
        stage.keep_if_best(epoch, (values["accuracy"], values["macro_accuracy"], -values["loss"]))
        return {f"validation/{name}": value for name, value in values.items()}

    plan = Plan(
        checkpoints=task.run.checkpoint_dir / arm,
        metrics=task.run.artifact_dir / arm,
        config=written,
        steps=source.steps,
        epochs=config.epochs,
        checkpoint_every=config.checkpoint_every,
        label=arm,
    )
    outcome = train(
        Pipeline(source, [stage]),
        plan,
        task.run,
        evaluate=evaluate,
        score=lambda values: values["validation/accuracy"],
    )
    return outcome, stage.restore_best()
