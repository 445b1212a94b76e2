"""Tests of trainer/console.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.progress import Progress, read_progress
from trainer.console import ProgressReporter


def test_a_runner_finds_the_progress_in_its_file(tmp_path: Path) -> None:
    reporter = ProgressReporter(tmp_path / "progress.json")
    reporter.update(Progress(step=1, total=10, message="epoch 1 of 5"))
    read = read_progress(tmp_path / "progress.json")
    assert read == Progress(step=1, total=10, message="epoch 1 of 5")


def test_of_many_updates_few_are_written_and_the_last_always(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    reporter = ProgressReporter(path)
    reporter.update(Progress(step=1, total=1000))
    first = path.stat().st_ino
    for step in range(2, 50):
        reporter.update(Progress(step=step, total=1000))
    assert path.stat().st_ino == first
    reporter.update(Progress(step=1000, total=1000))
    assert read_progress(path) == Progress(step=1000, total=1000)


def test_progress_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = ProgressReporter(tmp_path / "nowhere" / "progress.json")
    for step in (1, 2, 2):
        reporter.update(Progress(step=step, total=2))
    said = capsys.readouterr().err
    assert said.count("progress is not shown any more") == 1
    assert "progress.json: No such file" in said


def test_without_a_runner_or_a_terminal_nothing_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = ProgressReporter(None)
    reporter.update(Progress(step=1, total=1))
    reporter.close()
    assert capsys.readouterr() == ("", "")
