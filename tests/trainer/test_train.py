"""Tests of trainer/train.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import DataError
from trainer.checkpoint import newest_valid, save
from trainer.engine.pipeline import Pipeline
from trainer.engine.stage import Item, StageError
from trainer.metrics import read_metrics
from trainer.run import Run
from trainer.train import Outcome, Plan, curve_artifacts, train

EPOCHS, STEPS = 7, 21


class Numbers:
    name = "source"

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[Item[int]]:
        for seq in range(self.start, STEPS):
            yield Item(seq=seq, epoch=seq // 3, payload=seq, last=seq % 3 == 2)

    def state_dict(self, consumed: int) -> Mapping[str, Any]:
        return {"consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["consumed"]


class Learn:
    """Keeps a running value, as an optimiser does, and may fail at a step."""

    name = "learn"

    def __init__(self, fail_at: int | None = None) -> None:
        self.value = torch.zeros(())
        self.fail_at = fail_at

    def process(self, item: Item[int]) -> Item[Mapping[str, float]]:
        if item.seq == self.fail_at:
            raise RuntimeError("gone")
        self.value = self.value * 0.9 + item.payload
        return item.with_payload({"train/loss": float(self.value)})

    def state_dict(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]

    def close(self) -> None:
        return None


@pytest.fixture
def run(standalone: Callable[[str], Run]) -> Run:
    return standalone("pretrain")


def go(run: Run, stage: Learn, *, config: Mapping[str, Any] | None = None) -> Outcome:
    plan = Plan(
        checkpoints=run.checkpoint_dir,
        metrics=run.artifact_dir,
        config={"width": 4, "threads": 1} if config is None else config,
        steps=STEPS,
        epochs=EPOCHS,
        checkpoint_every=2,
    )
    return train(
        Pipeline(Numbers(), [stage]),
        plan,
        run,
        evaluate=lambda epoch: {"validation/loss": abs(epoch - 2.0)},
        score=lambda values: -values["validation/loss"],
    )


def steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in directory.glob("checkpoint-*.pt"))


def test_a_checkpoint_is_kept_every_few_epochs_and_at_the_end(run: Run) -> None:
    outcome = go(run, Learn())
    # Every second epoch and the last: 6, 12, 18, 21. The two newest, and the best: epoch 3 or 1.
    assert steps(run.checkpoint_dir) == [6, 18, 21]
    assert [entry["epoch"] for entry in outcome.history] == list(range(7))
    assert outcome.clocks["learn"]["items"] == STEPS


@pytest.mark.parametrize("fail_at", [1, 6, 10, 20])
def test_a_run_that_failed_goes_on_as_if_it_had_not(run: Run, fail_at: int) -> None:
    whole = Learn()
    go(run, whole)
    curves = read_metrics(run.artifact_dir / "metrics.jsonl")
    history = go(run, Learn()).history  # nothing is left to do, and the history is still there
    for path in run.checkpoint_dir.iterdir():
        path.unlink()

    with pytest.raises(StageError):
        go(run, Learn(fail_at=fail_at))
    resumed = Learn()
    outcome = go(run, resumed)
    assert torch.equal(resumed.value, whole.value)
    assert outcome.resumed_from == fail_at // 6 * 6
    assert outcome.history == history
    again = read_metrics(run.artifact_dir / "metrics.jsonl")
    assert [{**r, "time": 0} for r in again] == [{**r, "time": 0} for r in curves]


def test_curves_up_to_a_checkpoint_are_written_before_it(run: Run) -> None:
    written: list[int] = []

    class Watching(Learn):
        def process(self, item: Item[int]) -> Item[Mapping[str, float]]:
            if item.seq in (6, 12):
                records = read_metrics(run.artifact_dir / "metrics.jsonl")
                written.append(int(records[-1]["step"]))
            return super().process(item)

    go(run, Watching())
    assert written == [6, 12]


def test_a_checkpoint_cut_short_costs_only_the_steps_since_the_one_before(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageError):
        go(run, Learn(fail_at=14))
    found = newest_valid(run.checkpoint_dir)
    assert found is not None
    found[0].write_bytes(found[0].read_bytes()[:-7])
    outcome = go(run, Learn())
    assert outcome.resumed_from == 6
    assert "cut short" in capsys.readouterr().err


def test_a_checkpoint_of_another_configuration_is_refused(run: Run) -> None:
    go(run, Learn())
    with pytest.raises(DataError, match="width was 4, is 8"):
        go(run, Learn(), config={"width": 8, "threads": 1})
    go(run, Learn(), config={"width": 4, "threads": 2})


def test_a_checkpoint_of_another_version_is_refused(run: Run) -> None:
    save(run.checkpoint_dir, 3, {"version": 99})
    with pytest.raises(DataError, match="its state has version 99; this program reads 1"):
        go(run, Learn())


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {"version": 1},
        lambda state: state | {"pipeline": 3},
        lambda state: state | {"pipeline": state["pipeline"] | {"stages": {"learn": {}}}},
        lambda state: state | {"config": None},
    ],
)
def test_a_state_that_other_code_wrote_is_refused_by_name(
    run: Run, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    go(run, Learn())
    found = newest_valid(run.checkpoint_dir)
    assert found is not None
    save(run.checkpoint_dir, STEPS + 1, damage(found[1]))
    with pytest.raises(DataError, match=r"00000022\.pt: its state does not fit this program"):
        go(run, Learn())


def test_curves_are_artefacts_an_event_file_for_each_attempt(run: Run) -> None:
    with pytest.raises(StageError):
        go(run, Learn(fail_at=14))
    go(run, Learn())
    artifacts = curve_artifacts(run, run.artifact_dir)
    assert sorted(artifacts) == ["metrics", "tensorboard", "tensorboard-2"]
    assert artifacts["metrics"].path == "metrics.jsonl"
    assert artifacts["tensorboard"].path.startswith("tensorboard/events.out.tfevents.")
