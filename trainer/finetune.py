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
from pathlib import Path
from typing import Any

import torch

from protocol.names import RunId
from protocol.results import StageReport
from trainer.arms import Arm, best_arm
from trainer.base import Base, BaseEncoder, load_base
from trainer.classifier import Classifier, save_classifier
from trainer.config import as_json, require, require_counts, require_seed, require_threads
from trainer.data import ClipSource, Part, learning_parts
from trainer.devices import set_up_torch
from trainer.engine.pipeline import Pipeline
from trainer.finetune_stage import FinetuneStage
from trainer.hashing import code_hash
from trainer.pool.format import Pool, Rows, open_pool
from trainer.run import Run
from trainer.schedule import Rates, lp_ft_rates
from trainer.train import Outcome, Plan, curve_artifacts, train
from trainer.validation import Validation

CLASSIFIER = "classifier.safetensors"


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
        counts = ("epochs", "batch_size", "checkpoint_every", "probe_epochs")
        require_counts("finetune", self, *counts)
        require_seed("finetune", self.seed)
        require_threads("finetune", self.threads)
        for name in ("rate", "probe_rate"):
            value = getattr(self, name)
            require("finetune", name, value, holds=0 < value <= 1, right="above 0, at most 1")
        checks = {
            "probe_epochs": (self.probe_epochs < self.epochs, "less than epochs"),
            "arm": (bool(self.arm), "one arm or more"),
            "warmup": (0 <= self.warmup <= 1, "from 0 to 1"),
            "validation": (0 < self.validation < 1, "between 0 and 1"),
            "weight_decay": (0 <= self.weight_decay <= 1, "from 0 to 1"),
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
    parts = learning_parts(pool, index=config.index, validation_share=config.validation)
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
    written = as_json(task.config) | {"arm": str(arm), "inputs": dict(task.base.inputs)}
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
