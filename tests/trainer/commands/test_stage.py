"""Tests of trainer/commands/stage.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from protocol.errors import DataError, UsageError
from protocol.results import Results, StageReport
from trainer.commands.stage import RunOptions, report_table, run_stage
from trainer.run import Run, open_run


def work(config: str, run: Run) -> StageReport:
    return StageReport(
        run_id=run.run_id, stage=run.stage, metrics={"accuracy": 0.75}, config={"name": config}
    )


def fail(config: str, run: Run) -> StageReport:
    raise DataError("read the pool", why=config)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCD_RUN_ID", raising=False)


def test_a_stage_that_ends_is_recorded_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage("gate", work, "a", RunOptions(output=tmp_path, json=True))
    report = json.loads(capsys.readouterr().out)
    assert (report["run_id"], report["config"]) == ("gate.0001.0000", {"name": "a"})
    assert list(Results.load(tmp_path / "results.json").runs) == ["gate.0001.0000"]


def test_a_stage_that_fails_at_once_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cut short"):
        run_stage("gate", fail, "cut short", RunOptions(output=tmp_path))
    assert not (tmp_path / "results.json").exists()
    assert not list(tmp_path.glob("artifacts/*")) + list(tmp_path.glob("store/checkpoints/*"))


def test_resume_finds_the_run_that_got_further_and_not_a_later_mistake(tmp_path: Path) -> None:
    def get_on(config: str, run: Run) -> StageReport:
        (run.checkpoint_dir / "checkpoint-00000001.pt").write_text("far")
        return fail(config, run)

    for each in (get_on, fail):
        with pytest.raises(DataError):
            run_stage("gate", each, "cut short", RunOptions(output=tmp_path))
    with open_run("gate", output=tmp_path, resume=True, environ={}) as run:
        assert (run.run_id, run.attempt) == ("gate.0001.0000", 2)


def test_the_table_shows_the_verdict_and_a_column_for_each_arm() -> None:
    def arm(name: str, accuracy: float) -> StageReport:
        return StageReport(
            run_id=f"gate.0001.0000.{name}",
            stage="gate",
            metrics={"accuracy": accuracy, "best_epoch": 28.0},
            durations={"train": 1.25},
        )

    report = StageReport(
        run_id="gate.0001.0000",
        stage="gate",
        verdict="promote",
        arms={"full": arm("full", 0.5), "lp-ft": arm("lp-ft", 0.123456)},
        detail={"best_arm": "full"},
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table(report))
    lines = [line.split() for line in capture.get().replace("│", " ").splitlines()]
    assert "full (best) ┃ lp-ft" in capture.get()
    for row in (
        ["gate.0001.0000"],
        ["verdict", "promote"],
        ["accuracy", "0.5", "0.1235"],
        ["best_epoch", "28", "28"],
        ["train", "took", "1.2", "s", "1.2", "s"],
    ):
        assert row in lines


def test_every_artefact_is_named_by_a_path_that_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(config: str, run: Run) -> StageReport:
        (run.artifact_dir / "model.onnx").write_text(config)
        report = work(config, run)
        return replace(report, artifacts={"model": run.artifact("model.onnx")})

    monkeypatch.setenv("COLUMNS", "20")
    run_stage("gate", make, "a", RunOptions(output=tmp_path))
    last = capsys.readouterr().out.splitlines()[-1].strip()
    assert Path(last).read_text() == "a"


def test_a_run_id_and_resume_together_are_refused() -> None:
    with pytest.raises(UsageError, match="--run-id and --resume are both given"):
        RunOptions(run_id="gate.0001.0000", resume=True)
