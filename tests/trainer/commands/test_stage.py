"""Tests of trainer/commands/stage.py."""

from __future__ import annotations

import json
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


def test_a_stage_that_fails_leaves_its_run_unfinished_and_free_to_resume(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cut short"):
        run_stage("gate", fail, "cut short", RunOptions(output=tmp_path))
    assert not (tmp_path / "results.json").exists()
    with open_run("gate", output=tmp_path, resume=True, environ={}) as run:
        assert (run.run_id, run.attempt) == ("gate.0001.0000", 2)


def test_the_table_shows_the_verdict_and_each_arms_metrics() -> None:
    arm = StageReport(run_id="gate.0001.0000.full", stage="gate", metrics={"accuracy": 0.5})
    report = StageReport(
        run_id="gate.0001.0000", stage="gate", verdict="promote", arms={"full": arm}
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table(report))
    for words in ("gate.0001.0000", "promote", "full: accuracy", "0.5000"):
        assert words in capture.get()


def test_a_run_id_and_resume_together_are_refused() -> None:
    with pytest.raises(UsageError, match="--run-id and --resume are both given"):
        RunOptions(run_id="gate.0001.0000", resume=True)
