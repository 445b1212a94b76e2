"""A worker is silent for as long as its file's time is the same, by the looker's own clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syncd.notebook.pulse import LATE_SECONDS, Pulse

BEGAN = -1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "status.json"
    path.touch()
    return path


def touch(file: Path, nanoseconds: int) -> None:
    os.utime(file, ns=(nanoseconds, nanoseconds))


def test_silence_counts_from_when_the_change_was_seen(file: Path) -> None:
    pulse = Pulse(file)
    assert pulse.silence(BEGAN, now=100.0) == 0.0
    assert pulse.silence(BEGAN, now=105.0) == 5.0
    touch(file, 1)  # a clock that went back is a change all the same
    assert pulse.silence(BEGAN, now=106.0) == 0.0
    assert pulse.silence(BEGAN, now=108.0) == 2.0


def test_a_worker_that_has_not_begun_is_not_silent(file: Path) -> None:
    pulse = Pulse(file)
    began = pulse.mark()
    assert [pulse.silence(began, now=at) for at in (100.0, 105.0)] == [0.0, 0.0]
    touch(file, 1)
    assert [pulse.silence(began, now=at) for at in (106.0, 107.0)] == [0.0, 1.0]


def test_who_was_suspended_himself_begins_to_count_anew(file: Path) -> None:
    pulse = Pulse(file)
    pulse.silence(BEGAN, now=100.0)
    late = 100.0 + LATE_SECONDS + 1
    assert pulse.silence(BEGAN, now=late) == 0.0
    assert pulse.silence(BEGAN, now=late + 1) == 1.0


def test_without_a_file_it_has_not_begun(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "none")
    assert pulse.mark() == 0
    assert [pulse.silence(0, now=at) for at in (100.0, 105.0)] == [0.0, 0.0]
