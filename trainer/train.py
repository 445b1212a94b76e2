"""The training loop, for every stage that trains: resume, run the pipeline, evaluate, checkpoint.

What differs between stages is in their pipeline's stages and in `evaluate`. No generator's state is
kept in a checkpoint: what is random follows from (seed, epoch, sample) (`trainer/randomness.py`),
and a stage that drew from torch's global generator would not resume exactly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import DataError
from protocol.publish import make_dirs
from protocol.results import Artifact
from trainer import checkpoint
from trainer.console import say
from trainer.engine.pipeline import Pipeline
from trainer.engine.stage import Item
from trainer.metrics import METRICS, TENSORBOARD, MetricsWriter
from trainer.run import Run

Metrics = Mapping[str, float]
STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and how often a training writes, and what makes a checkpoint its own.

    `config` is the configuration as JSON: a checkpoint of another one is refused, save for the
    fields in `may_change` (whether the data is the same, the source checks itself). `steps` is
    the length of the whole run. A checkpoint is written every `checkpoint_every` epochs and after
    the last one.
    """

    checkpoints: Path
    metrics: Path
    config: Mapping[str, Any]
    steps: int
    epochs: int
    checkpoint_every: int = 5
    keep_last: int = 2
    keep_best: int = 1
    may_change: frozenset[str] = frozenset({"threads", "device", "pool", "index"})
    label: str = ""


@dataclass(kw_only=True)
class Outcome:
    """How a training went. `history` has one entry an epoch: {"epoch": 0, ...evaluate's values}.

    `resumed_from` is the step it was resumed from, 0 for a fresh one; `seconds` is this
    attempt's alone; `clocks` is the pipeline's report.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    resumed_from: int = 0
    seconds: float = 0.0
    clocks: dict[str, dict[str, float]] = field(default_factory=dict)


def train(
    pipeline: Pipeline,
    plan: Plan,
    run: Run,
    *,
    evaluate: Callable[[int], Metrics],
    score: Callable[[Metrics], float],
) -> Outcome:
    """Train to the end of the plan, from the newest whole checkpoint if there is one.

    The last stage's payload is the step's metrics. `evaluate(epoch)` is called after each epoch,
    before its checkpoint; what it returns is recorded, and `score` ranks the checkpoint by it
    (higher is better).

    Raises DataError when the checkpoint is of another configuration or other data.
    """
    make_dirs(plan.checkpoints)
    outcome = Outcome()
    _resume(pipeline, plan, outcome)
    begin = time.perf_counter()
    writer = MetricsWriter(plan.metrics, resume_step=pipeline.consumed)
    with contextlib.closing(writer) as metrics:
        hooks = _Hooks(pipeline, plan, run, metrics, outcome, evaluate, score)
        pipeline.after_step.append(hooks.after_step)
        pipeline.after_epoch.append(hooks.after_epoch)
        pipeline.run()
    outcome.seconds = time.perf_counter() - begin
    outcome.clocks = pipeline.report()
    return outcome


def curve_artifacts(run: Run, directory: Path) -> dict[str, Artifact]:
    """Return the curves in `directory` as artefacts: `metrics`, and each event file.

    A resumed run has one event file for each attempt, `tensorboard`, `tensorboard-2`, ...
    """
    artifacts = {"metrics": run.artifact(directory / METRICS)}
    events = sorted((directory / TENSORBOARD).glob("events.out.tfevents.*"))
    for number, path in enumerate(events, start=1):
        role = "tensorboard" if number == 1 else f"tensorboard-{number}"
        artifacts[role] = run.artifact(path)
    return artifacts


def _resume(pipeline: Pipeline, plan: Plan, outcome: Outcome) -> None:
    found = checkpoint.newest_valid(plan.checkpoints)
    if found is None:
        return
    path, state = found
    version = state.get("version")
    if version != STATE_VERSION:
        raise DataError(
            "resume from the checkpoint",
            path=path,
            why=f"its state has version {version!r}; this program reads {STATE_VERSION}",
            hint="Resume with the program that wrote it, or start a new run.",
        )
    try:
        checkpoint.check_config(state["config"], plan.config, path=path, ignore=plan.may_change)
        pipeline.load_state_dict(state["pipeline"])
        outcome.history = list(state["history"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # Whole, and of this configuration, but made by other code: say so, and touch nothing.
        raise DataError(
            "resume from the checkpoint",
            path=path,
            why=f"its state does not fit this program: {str(error).splitlines()[0]}",
            hint="Resume with the program that wrote it, or start a new run.",
        ) from error
    outcome.resumed_from = pipeline.consumed
    say(f"resumed from step {pipeline.consumed} of {plan.steps} ({path.name})")


@dataclass(frozen=True)
class _Hooks:
    pipeline: Pipeline
    plan: Plan
    run: Run
    metrics: MetricsWriter
    outcome: Outcome
    evaluate: Callable[[int], Metrics]
    score: Callable[[Metrics], float]

    def after_step(self, item: Item[Metrics]) -> None:
        step = item.seq + 1
        self.metrics.write(step, item.payload)
        message = f"{self.plan.label} epoch {item.epoch + 1} of {self.plan.epochs}".strip()
        self.run.progress(step, self.plan.steps, "step", message)

    def after_epoch(self, item: Item[Metrics]) -> None:
        done = item.epoch + 1
        values = dict(self.evaluate(item.epoch))
        self.outcome.history.append({"epoch": item.epoch, **values})
        self.metrics.write(item.seq + 1, values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        say(f"{self.plan.label} epoch {done}/{self.plan.epochs}  {shown}".strip())
        if done % self.plan.checkpoint_every == 0 or done == self.plan.epochs:
            self.save(item.seq + 1, self.score(values))

    def save(self, step: int, score: float) -> None:
        state = {
            "version": STATE_VERSION,
            "config": dict(self.plan.config),
            "pipeline": self.pipeline.state_dict(),
            "history": self.outcome.history,
        }
        directory = self.plan.checkpoints
        # The curves up to a checkpoint go first: a run resumed from it will not draw them again.
        self.metrics.flush()
        checkpoint.save(directory, step, state, score=score)
        checkpoint.prune(directory, keep_last=self.plan.keep_last, keep_best=self.plan.keep_best)
