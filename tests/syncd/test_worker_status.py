"""The worker's status is written when it changes, and touched by a worker that answers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.paths import Layout
from syncd.view import read_status
from syncd.worker_status import WorkerStatus

IDLE: Any = SimpleNamespace(
    entries=[], plan=SimpleNamespace(waits={}), journal=SimpleNamespace(newest={})
)


class Kept:
    """A status that an idle worker keeps in a folder."""

    def __init__(self, folder: Path) -> None:
        self.layout = Layout(folder)
        self.layout.inbox.mkdir()
        self.layout.private.mkdir()
        self._status = WorkerStatus(self.layout, worker="w", sealed=True)

    def update(self, *, unsent: int = 0) -> None:
        none: Any = None  # no run asks for its checkpoints
        self._status.update(
            IDLE, unsent=unsent, progress=0, checkpoints=none, inherited=lambda _: "", problems=()
        )

    @property
    def file(self) -> Path:
        return self.layout.private / "status.json"

    def unsent(self) -> int:
        found = read_status(self.layout)
        assert found is not None
        return found.unsent_bytes


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_that_nothing_is_unsent_any_more_is_written_though_it_is_not_shown(kept: Kept) -> None:
    kept.update(unsent=89)
    assert kept.unsent() == 89
    shown = kept.layout.status.read_text()
    assert "89 B" not in shown
    kept.update()
    assert kept.unsent() == 0
    assert kept.layout.status.read_text() == shown


def test_what_did_not_change_is_touched_and_not_written(kept: Kept) -> None:
    kept.update()
    before = kept.file.stat().st_ino
    os.utime(kept.file, ns=(1, 1))
    kept.update()
    assert kept.file.stat().st_mtime_ns > 1
    assert kept.file.stat().st_ino == before


def test_a_status_that_was_taken_away_is_written_again(kept: Kept) -> None:
    kept.update()
    kept.file.unlink()
    kept.update()
    assert kept.unsent() == 0
