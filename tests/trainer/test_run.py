"""Tests of trainer/run.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import DataError, RefusedError, UsageError
from protocol.progress import read_progress
from protocol.publish import publish_bytes
from protocol.results import Artifact, Results, RunRecord, StageReport, read_report
from protocol.stage_env import StageEnvironment
from protocol.states import Result
from trainer.run import Run, open_run

Opener = Callable[[str], Run]


@pytest.fixture
def given(tmp_path: Path) -> StageEnvironment:
    return StageEnvironment(
        run_id="finetune.0007.7f3a",
        stage="finetune",
        attempt=2,
        checkpoint_dir=tmp_path / "checkpoints" / "finetune.0007.7f3a",
        artifact_dir=tmp_path / "artifacts" / "finetune.0007.7f3a",
        result_file=tmp_path / "report.json",
        progress_file=tmp_path / "progress.json",
        store=tmp_path / "store",
        payload=tmp_path / "payload",
        results=tmp_path / "results.json",
        after={"pretrain": "pretrain.0003.7f3a"},
    )


def adopt(given: StageEnvironment, stage: str = "finetune") -> Run:
    return open_run(stage, output=Path("unused"), environ=given.to_environ())


def finished(run: Run, **artifacts: bytes) -> StageReport:
    """Finish `run` with artefacts of the given roles and contents."""
    for role, data in artifacts.items():
        publish_bytes(run.artifact_dir / f"{role}.bin", data)
    report = StageReport(
        run_id=run.run_id,
        stage=run.stage,
        artifacts={role: run.artifact(f"{role}.bin") for role in artifacts},
    )
    run.finish(report)
    run.close()
    return report


def test_under_a_runner_everything_comes_from_its_environment(given: StageEnvironment) -> None:
    run = adopt(given)
    assert (run.run_id, run.attempt, run.store) == (given.run_id, 2, given.store)
    assert run.artifact_dir.is_dir()
    assert run.checkpoint_dir.is_dir()
    assert run.input_run("pretrain") == "pretrain.0003.7f3a"


def test_under_a_runner_the_report_and_the_progress_go_to_its_files(
    given: StageEnvironment,
) -> None:
    run = adopt(given)
    run.progress(5, 5, "epoch", "done")
    report = finished(run, encoder=b"weights")
    progress = read_progress(given.progress_file)
    assert progress is not None
    assert progress.fraction == 1.0
    assert read_report(given.result_file, run_id=run.run_id, stage="finetune") == report
    assert not given.results.exists()


def test_a_runner_that_names_no_run_to_use_is_an_error_and_not_a_guess(
    given: StageEnvironment,
) -> None:
    Results(
        [RunRecord(run_id="gate.0001.7f3a", stage="gate", line="", result=Result.SUCCESS)]
    ).save(given.results)
    with pytest.raises(UsageError, match=r'Add after = \["gate"\]'):
        adopt(given).input_run("gate")


def test_a_program_started_for_another_stage_refuses(given: StageEnvironment) -> None:
    with pytest.raises(UsageError, match="started this program for stage 'finetune'"):
        adopt(given, "pretrain")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run_id": "gate.0007.7f3a"}, "SYNCD_RUN_ID is gate.0007.7f3a, which is no run of"),
        ({"run_id": "finetune.0007.7f3a.full"}, "SYNCD_RUN_ID is finetune.0007.7f3a.full"),
        ({"store": Path()}, "SYNCD_STORE is '.'; it must be an absolute path"),
        ({"artifact_dir": Path("a")}, "SYNCD_ARTIFACT_DIR is 'a'; it must be"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(
    given: StageEnvironment, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        adopt(replace(given, **change))


def test_a_report_that_could_not_be_read_again_is_never_recorded(
    tmp_path: Path, standalone: Opener
) -> None:
    finished(standalone("pretrain"))
    run = standalone("pretrain")
    report = StageReport(run_id=run.run_id, stage=run.stage, seed=2**70)
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        run.finish(report)
    assert list(Results.load(tmp_path / "runs" / "results.json").runs) == ["pretrain.0001.0000"]


def test_a_report_that_cannot_be_written_is_an_error_that_names_the_file(
    given: StageEnvironment,
) -> None:
    given.result_file.mkdir()
    with pytest.raises(DataError, match=r"publish the report: .*report\.json: Is a directory"):
        finished(adopt(given))


def test_records_written_at_once_are_all_kept(tmp_path: Path, standalone: Opener) -> None:
    runs = [standalone("pretrain") for _ in range(12)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(finished, runs))
    assert set(Results.load(tmp_path / "runs" / "results.json").runs) == {r.run_id for r in runs}


def test_by_hand_the_newest_success_is_used_unless_a_flag_names_one(standalone: Opener) -> None:
    first, second = standalone("pretrain"), standalone("pretrain")
    # The later run ends first, or a clock was wrong: what is newer goes by the number.
    finished(second)
    finished(first)
    run = standalone("finetune")
    assert run.input_run("pretrain") == second.run_id
    assert run.input_run("pretrain", first.run_id) == first.run_id
    with pytest.raises(UsageError, match="builds on a run of stage 'pretrain'"):
        run.input_run("pretrain", "gate.0001.0000")
    with pytest.raises(UsageError, match=r"not of the form .* Such as pretrain\.0001\.0000"):
        run.input_run("pretrain", "the first one")


def test_with_no_earlier_run_the_message_says_what_to_run(standalone: Opener) -> None:
    with pytest.raises(UsageError, match="Run `trainer pretrain` first"):
        standalone("finetune").input_run("pretrain")


def test_an_earlier_runs_artefact_is_found_by_its_role(standalone: Opener) -> None:
    earlier = standalone("pretrain")
    finished(earlier, encoder=b"weights")
    path = standalone("finetune").input_artifact("pretrain", earlier.run_id, "encoder")
    assert path.read_bytes() == b"weights"


def test_an_arms_artefact_lies_with_the_run_it_is_an_arm_of(standalone: Opener) -> None:
    earlier = standalone("finetune")
    (earlier.artifact_dir / "lp-ft").mkdir()
    publish_bytes(earlier.artifact_dir / "lp-ft" / "c.bin", b"head")
    arm = StageReport(
        run_id=f"{earlier.run_id}.lp-ft",
        stage="finetune",
        artifacts={"classifier": earlier.artifact("lp-ft/c.bin")},
    )
    report = StageReport(run_id=earlier.run_id, stage="finetune", arms={"lp-ft": arm})
    earlier.finish(report)
    path = standalone("export").input_artifact("finetune", arm.run_id, "classifier")
    assert path == earlier.artifact_dir / "lp-ft" / "c.bin"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(b"weight"), "6 bytes long; its run reported 7"),
        (lambda path: path.write_bytes(b"WEIGHTS"), "SHA-256 is not the one"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_an_artefact_that_is_not_the_one_reported_is_refused(
    standalone: Opener, damage: Callable[[Path], None], why: str
) -> None:
    earlier = standalone("pretrain")
    finished(earlier, encoder=b"weights")
    damage(earlier.artifact_dir / "encoder.bin")
    with pytest.raises(DataError, match=why):
        standalone("finetune").input_artifact("pretrain", earlier.run_id, "encoder")


def test_an_artefact_that_was_not_made_is_named(standalone: Opener) -> None:
    earlier = standalone("pretrain")
    finished(earlier, encoder=b"weights")
    with pytest.raises(DataError, match=r"the bundle of run .*it made \['encoder'\]"):
        standalone("finetune").input_artifact("pretrain", earlier.run_id, "bundle")


def test_a_path_out_of_the_run_is_never_followed(tmp_path: Path, standalone: Opener) -> None:
    earlier = standalone("pretrain")
    report = finished(earlier, encoder=b"weights")
    outside = Artifact(path="../../../secret", size=1, sha256="0" * 64)
    results = Results.load(tmp_path / "runs" / "results.json")
    record = results.runs[earlier.run_id]
    results.add(replace(record, report=replace(report, artifacts={"encoder": outside})))
    results.save(tmp_path / "runs" / "results.json")
    with pytest.raises(RefusedError):
        standalone("finetune").input_artifact("pretrain", earlier.run_id, "encoder")


def test_results_edited_by_hand_are_refused(tmp_path: Path, standalone: Opener) -> None:
    finished(standalone("pretrain"), encoder=b"weights")
    path = tmp_path / "runs" / "results.json"
    value = json.loads(path.read_text())
    value["runs"]["pretrain.0001.0000"]["attempts"] = 9
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match="changed since it was written"):
        standalone("finetune")


def test_a_report_of_another_run_is_a_fault(standalone: Opener) -> None:
    run = standalone("pretrain")
    with pytest.raises(ValueError, match=r"a report of pretrain\.0009\.0000"):
        run.finish(StageReport(run_id="pretrain.0009.0000", stage="pretrain"))
