"""Tests of trainer/pretrain.py, with real processes where one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.errors import UsageError
from protocol.results import Results
from trainer.data import Part, split_indices
from trainer.engine.stage import StageError
from trainer.hashing import file_sha256
from trainer.metrics import read_metrics
from trainer.model import EncoderConfig, load_encoder
from trainer.pool.format import Pool
from trainer.pretrain import PretrainConfig, Validation, nearest_accuracy, pretrain
from trainer.reconstruct import Reconstructor
from trainer.run import Run

TINY = EncoderConfig(width=16, depth=1, heads=2)
CPU = torch.device("cpu")
DEADLINE_S = 120.0


def test_the_baselines_are_what_a_predictor_of_a_constant_would_score(pool: Pool) -> None:
    rows = split_indices(pool, Part.VALIDATION)
    config = PretrainConfig()
    validation = Validation(pool, rows, config, CPU)
    errors: dict[str, list[float]] = {"0": [], "mean": []}
    for clip, mask in zip(validation.clips, np.repeat(validation.mask, 8, axis=1), strict=True):
        errors["0"] += (clip[mask] ** 2).tolist()
        errors["mean"] += ((clip[mask] - clip[~mask].mean()) ** 2).tolist()
    baselines = validation.baselines()
    assert baselines["validation_loss_predicting_0"] == pytest.approx(np.mean(errors["0"]))
    assert baselines["validation_loss_predicting_mean"] == pytest.approx(
        np.mean(errors["mean"]), rel=1e-5
    )


def test_the_nearest_vector_decides_by_its_class() -> None:
    known = np.array([[1, 0], [0, 1]], dtype=np.float32)
    queries = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], dtype=np.float32)
    accuracy = nearest_accuracy(known, np.array([5, 6]), queries, np.array([5, 6, 6]))
    assert accuracy == pytest.approx(2 / 3)


def test_pretraining_beats_the_trivial_predictors_and_reports_itself(
    pool_path: Path, pool: Pool, standalone: Callable[[str], Run]
) -> None:
    run = standalone("pretrain")
    config = PretrainConfig(
        pool=pool_path, epochs=12, threads=1, encoder=EncoderConfig(width=32, depth=1)
    )
    report = pretrain(config, run)
    run.finish(report)
    assert report.metrics["validation_loss"] < 0.8 * report.metrics["validation_loss_predicting_0"]
    assert (report.data_hash, report.seed) == (pool.content_hash, 0)
    assert report.config["encoder"]["width"] == 32
    assert report.detail["clips"] == {"train": 410, "validation": 93}
    for artifact in report.artifacts.values():
        assert file_sha256(run.artifact_dir / artifact.path) == artifact.sha256
    encoder, meta = load_encoder(run.artifact_dir / "encoder.safetensors")
    assert encoder.config.width == 32
    assert meta["run_id"] == run.run_id
    curve = read_metrics(run.artifact_dir / "metrics.jsonl")
    assert max(record["train/rate"] for record in curve if "train/rate" in record) == config.rate


def test_a_failure_in_the_middle_is_a_stage_error(
    pool_path: Path, standalone: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Reconstructor, clips: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Reconstructor, "forward", broken)
    config = PretrainConfig(pool=pool_path, threads=1, encoder=TINY)
    with pytest.raises(StageError, match=r"stage 'train' failed on item 0 .*32 samples"):
        pretrain(config, standalone("pretrain"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"epochs": 0}, "epochs is 0; it must be from 1"),
        ({"mask": 1.0}, "mask is 1.0; it must be between 0 and 1"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"threads": 0}, "threads is 0"),
        ({"warmup": 2.0}, "warmup is 2.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_made(fields: dict[str, float], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        PretrainConfig(**fields)  # type: ignore[arg-type]


def test_an_encoder_for_clips_of_another_length_is_refused(
    pool_path: Path, standalone: Callable[[str], Run]
) -> None:
    config = PretrainConfig(pool=pool_path, encoder=EncoderConfig(length=64))
    with pytest.raises(UsageError, match=r"encoder\.length is 64; it must be 128, the length of"):
        pretrain(config, standalone("pretrain"))


def start(pool_path: Path, output: Path, *extra: str) -> subprocess.Popen[str]:
    arguments = ["--pool", str(pool_path), "--output", str(output), "--epochs", "25"]
    arguments += ["--checkpoint-every", "1", "--threads", "1", "--encoder.width", "16"]
    arguments += ["--encoder.depth", "1", "--encoder.heads", "2"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCD_", "TRAINER_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "pretrain", *arguments, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    """Read what the process says on stderr until a line begins so; fail if it ends first."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        if line.startswith(beginning):
            return
        said.append(line)
    raise AssertionError("".join(said))


def test_a_run_killed_at_any_time_ends_as_if_it_had_not_been(
    pool_path: Path, tmp_path: Path
) -> None:
    whole = start(pool_path, tmp_path / "whole")
    killed = start(pool_path, tmp_path / "killed")
    kills = 0
    for epoch in (3, 10):
        # Said before the epoch's checkpoint is begun, so that the kill falls anywhere around it.
        wait_for_line(killed, f"epoch {epoch}/")
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        kills += 1
        assert not (tmp_path / "killed" / "results.json").exists()
        killed = start(pool_path, tmp_path / "killed", "--resume")
    said = killed.communicate(timeout=DEADLINE_S)[1]
    assert killed.returncode == 0, said
    assert "resumed from step" in said
    errors = whole.communicate(timeout=DEADLINE_S)[1]
    assert whole.returncode == 0, errors

    run_id = "pretrain.0001.0000"
    folders = [tmp_path / name / "artifacts" / run_id for name in ("whole", "killed")]
    weights = [(folder / "encoder.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    curves = [
        [{**record, "time": 0} for record in read_metrics(folder / "metrics.jsonl")]
        for folder in folders
    ]
    assert curves[0] == curves[1]
    records = [
        Results.load(tmp_path / name / "results.json").runs[run_id] for name in ("whole", "killed")
    ]
    assert [record.attempts for record in records] == [1, kills + 1]
    assert records[0].report is not None
    assert records[1].report is not None
    assert records[0].report.metrics == records[1].report.metrics
