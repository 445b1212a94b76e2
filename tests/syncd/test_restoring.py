"""A worker that takes over, step by step: nothing starts before its checkpoints are here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store
from stepping import Attempts, Clock, SteppedEnd

from protocol.wire import Role
from syncd.config import Key
from syncd.delivery.contents import Contents

STAGES = '[stages.train]\ncommand = "train"\n'
SAVED = {"model.pt": b"model" * 200_000, "optim.pt": b"optim" * 200_000}


class Scene:
    """A laptop, a worker whose run has made a checkpoint, and the one that comes after it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.folder, self.store, self.key = folder, Store(), Key.new()
        self.laptop = self._end("laptop", Role.CONTROLLER)
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        old = self._end("old", Role.WORKER)
        self.rounds(self.laptop, old)
        self.laptop.layout.queue.write_text("run:train\n")
        self.rounds(self.laptop, old)
        self.run = self.laptop.journal()[1].run_id
        saved = self.checkpoints(old)
        for name, data in SAVED.items():
            (saved / name).write_bytes(data)
        self.rounds(self.laptop, old)
        self.rounds(self.laptop, old)
        old.kill()
        self.new = self._end("new", Role.WORKER)

    def _end(self, name: str, role: Role) -> SteppedEnd:
        remote = FakeRemote(self.store, Faults(random.Random(1)), name)
        return SteppedEnd(self.folder / name, role, remote, self.key)

    def rounds(self, *ends: SteppedEnd) -> None:
        for _ in range(6):
            for end in ends:
                end.start()
                for name in end.loops():
                    end.step(name)
            self.clock.advance(6.0)

    def checkpoints(self, end: SteppedEnd) -> Path:
        return end.layout.store / "checkpoints" / self.run

    def found(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.checkpoints(self.new).glob("*")}

    def is_running(self) -> bool:
        return any(path.is_relative_to(self.new.layout.root) for path in self.attempts.alive)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_run_goes_on_once_its_checkpoint_is_here(scene: Scene) -> None:
    scene.rounds(scene.laptop, scene.new)
    assert scene.is_running()
    assert scene.found() == SAVED


def test_with_the_disk_full_a_run_waits_and_is_not_begun_without_its_checkpoint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Contents, "room_for", lambda self, sha256, size: size < 1_500_000)
        for _ in range(3):
            scene.rounds(scene.laptop, scene.new)
    assert not scene.is_running()
    assert scene.found() == {}
    assert "the disk is full" in scene.laptop.layout.status.read_text()
    assert "nothing starts before" in scene.laptop.layout.status.read_text()
    scene.rounds(scene.laptop, scene.new)
    assert scene.is_running()
    assert scene.found() == SAVED
    assert "the disk is full" not in scene.laptop.layout.status.read_text()


def test_while_it_waits_what_its_predecessor_left_stays_on_the_remote(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Contents, "room_for", lambda self, sha256, size: size < 1_500_000)
        for _ in range(3):
            scene.rounds(scene.laptop, scene.new)
    scene.new.kill()
    scene.new = scene._end("newer", Role.WORKER)
    scene.rounds(scene.laptop, scene.new)
    assert scene.is_running()
    assert scene.found() == SAVED
