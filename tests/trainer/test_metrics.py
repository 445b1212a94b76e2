"""Tests of trainer/metrics.py."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from protocol.errors import DataError
from trainer.metrics import MetricsWriter, read_metrics


def record(directory: Path, steps: range, *, resume_step: int = 0, value: float = 1.0) -> None:
    with closing(MetricsWriter(directory, resume_step=resume_step)) as metrics:
        for step in steps:
            metrics.write(step, {"train/loss": value / step})


def test_what_is_recorded_is_one_json_object_a_line(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in read] == [1, 2, 3]
    assert [r["train/loss"] for r in read] == [1.0, 1 / 2, 1 / 3]
    assert all(r["time"] > 1e9 for r in read)


def test_a_resumed_run_draws_no_step_twice(tmp_path: Path) -> None:
    record(tmp_path, range(1, 11))
    record(tmp_path, range(6, 13), resume_step=5, value=2.0)
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in read] == list(range(1, 13))
    assert read[5]["train/loss"] == 2.0 / 6

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(1, 13))
    assert scalars[4].value == pytest.approx(1 / 5)
    assert scalars[5].value == pytest.approx(2 / 6)


def test_a_torn_last_line_is_dropped_on_resume(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ti')
    record(tmp_path, range(4, 6), resume_step=3)
    steps = [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5]


def test_a_line_that_a_full_disk_left_torn_is_passed_over(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "ti{"step": 3}\n\0\xff\n[]\n')
    record(tmp_path, range(3, 5), resume_step=2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]


def test_curves_that_cannot_be_written_are_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match=r"keep the curves: .*metrics\.jsonl: Is a directory"):
        MetricsWriter(tmp_path)


def test_a_fresh_run_starts_a_fresh_curve(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    record(tmp_path, range(1, 3), value=5.0)
    losses = [r["train/loss"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == [5.0, 2.5]


def test_records_wait_in_memory_until_they_are_flushed(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.write(1, {"loss": 1.0})
        assert read_metrics(tmp_path / "metrics.jsonl") == []
        metrics.flush()
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with (
        closing(MetricsWriter(tmp_path)) as metrics,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        metrics.write(1, {"loss": float("nan")})
