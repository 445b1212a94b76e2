"""Tests of trainer/standalone.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import BusyError, DataError, UsageError
from protocol.results import Results, StageReport
from trainer.run import Run, open_run

Opener = Callable[[str], Run]


def finished(run: Run) -> None:
    run.finish(StageReport(run_id=run.run_id, stage=run.stage))
    run.close()


def test_runs_by_hand_are_numbered_on_and_recorded(tmp_path: Path, standalone: Opener) -> None:
    first = standalone("pretrain")
    finished(first)
    second, other = standalone("pretrain"), standalone("Fine Tune")
    assert (first.run_id, second.run_id) == ("pretrain.0001.0000", "pretrain.0002.0000")
    assert other.run_id == "fine-tune.0001.0000"
    assert list(Results.load(tmp_path / "runs" / "results.json").runs) == [first.run_id]
    assert second.artifact_dir == tmp_path / "runs" / "artifacts" / second.run_id
    assert second.checkpoint_dir == tmp_path / "runs" / "store" / "checkpoints" / second.run_id


def test_runs_opened_at_once_have_different_numbers(standalone: Opener) -> None:
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: standalone("pretrain"), range(16)))
    assert len({run.run_id for run in runs}) == 16


def test_resume_takes_the_newest_unfinished_run(tmp_path: Path, standalone: Opener) -> None:
    left, done = standalone("pretrain"), standalone("pretrain")
    left.close()
    finished(done)
    (tmp_path / "runs" / "artifacts" / "pretrain.copy").mkdir()
    again = open_run("pretrain", output=tmp_path / "runs", resume=True, environ={})
    assert (again.run_id, again.attempt) == (left.run_id, 2)
    assert again.started == left.started or again.started < done.started + 1


def test_resume_with_nothing_unfinished_says_so(tmp_path: Path, standalone: Opener) -> None:
    finished(standalone("pretrain"))
    with pytest.raises(UsageError, match="no unfinished run of this stage"):
        open_run("pretrain", output=tmp_path / "runs", resume=True, environ={})


def test_a_run_id_that_does_not_fit_is_refused(tmp_path: Path, standalone: Opener) -> None:
    done = standalone("pretrain")
    finished(done)
    for run_id, match in (
        (done.run_id, "already ended"),
        ("gate.0001.0000", "not a run of stage 'pretrain'"),
        ("../../etc", "not a run of stage 'pretrain'"),
    ):
        with pytest.raises(UsageError, match=match):
            open_run("pretrain", output=tmp_path / "runs", run_id=run_id, environ={})


def test_two_processes_cannot_be_at_one_run(tmp_path: Path, standalone: Opener) -> None:
    run = standalone("pretrain")
    with pytest.raises(BusyError, match="another process holds it"):
        open_run("pretrain", output=tmp_path / "runs", run_id=run.run_id, environ={})
    run.close()
    open_run("pretrain", output=tmp_path / "runs", run_id=run.run_id, environ={}).close()


def test_a_damaged_note_of_the_attempts_is_named(tmp_path: Path, standalone: Opener) -> None:
    run = standalone("pretrain")
    run.close()
    (run.checkpoint_dir / "run.json").write_text("[]")
    with pytest.raises(DataError, match=r"run\.json.*Delete this file"):
        open_run("pretrain", output=tmp_path / "runs", run_id=run.run_id, environ={})


def test_a_number_claimed_in_vain_is_free_again(tmp_path: Path, standalone: Opener) -> None:
    standalone("gate").close()
    checkpoints = tmp_path / "runs" / "store" / "checkpoints"
    (checkpoints / "pretrain.0001.0000").write_text("in the way")
    with pytest.raises(DataError, match="open the run"):
        standalone("pretrain")
    (checkpoints / "pretrain.0001.0000").unlink()
    assert standalone("pretrain").run_id == "pretrain.0001.0000"


def test_a_run_that_has_made_something_is_kept_when_it_fails(standalone: Opener) -> None:
    run = standalone("pretrain")
    (run.artifact_dir / "metrics.jsonl").write_text("{}")
    run.__exit__(ValueError, ValueError("later"), None)
    assert (run.checkpoint_dir / "run.json").exists()


def test_what_a_killed_writer_left_is_removed_when_the_run_is_opened_again(
    tmp_path: Path, standalone: Opener
) -> None:
    run = standalone("pretrain")
    left = run.artifact_dir / ".encoder.safetensors.0123456789ab.tmp"
    left.write_text("half")
    run.close()
    open_run("pretrain", output=tmp_path / "runs", run_id=run.run_id, environ={}).close()
    assert not left.exists()
