"""Very many artefacts: all arrive, and the remote never holds very many objects."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store
from stepping import Clock, SteppedEnd, fast_folder

from protocol.wire import Role
from syncd.config import Key
from syncd.delivery import contents as contents_module

SIZE = 70_000  # more than a message holds


class Ends:
    """A laptop and a worker that makes artefacts, over a remote in memory, step by step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.clock = Clock(monkeypatch)
        self.store, self.faults = Store(), Faults(random.Random(0))
        self.key = Key.new()
        self.laptop = self.new("laptop", folder, Role.CONTROLLER)
        self.vm = self.new("vm", folder, Role.WORKER)
        self.random = random.Random(1)
        self.made: dict[str, bytes] = {}

    def new(self, name: str, folder: Path, role: Role) -> SteppedEnd:
        end = SteppedEnd(folder / name, role, FakeRemote(self.store, self.faults, name), self.key)
        end.start()
        return end

    def make(self) -> None:
        name, data = f"{len(self.made):04d}.bin", self.random.randbytes(SIZE)
        path = self.vm.layout.artifacts / "clips.0001.7f3a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.made[name] = data

    def round(self, *ends: SteppedEnd) -> None:
        self.clock.advance(2.0)
        for end in ends or (self.vm, self.laptop):
            for loop in ("pull", "main", "bulk", "push"):
                end.step(loop)

    def arrived(self, end: SteppedEnd) -> dict[str, bytes]:
        folder = end.layout.artifacts / "clips.0001.7f3a"
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def one_by_one(ends: Ends, count: int, *, most: int, laptop_every: int) -> None:
    for number in range(count):
        ends.make()
        ends.round(ends.vm)
        if number % laptop_every == 0:
            ends.round(ends.laptop)
        assert ends.store.count() < most
    for _ in range(5):
        ends.round()


@pytest.mark.parametrize("laptop_every", [1, 25])
def test_artefacts_that_come_one_by_one_are_put_together_and_arrive(
    monkeypatch: pytest.MonkeyPatch, laptop_every: int
) -> None:
    monkeypatch.setattr(contents_module, "MANY_CHUNKS", 12)
    with fast_folder() as folder:
        ends = Ends(folder, monkeypatch)
        one_by_one(ends, 50, most=60, laptop_every=laptop_every)  # each would make one
        assert ends.arrived(ends.laptop) == ends.made
        fresh = ends.new("vm2", folder, Role.WORKER)
        for _ in range(3):
            ends.round(fresh)
        assert ends.arrived(fresh) == ends.made


def test_many_artefacts_at_once_take_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with fast_folder() as folder:
        ends = Ends(folder, monkeypatch)
        for _ in range(100):
            ends.make()
        for _ in range(6):
            ends.round()
        assert ends.arrived(ends.laptop) == ends.made
        assert sum("-chunk-" in path for path in ends.store.files) == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_thousand_artefacts_keep_the_folder_under_a_thousand_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fast_folder() as folder:
        ends = Ends(folder, monkeypatch)
        one_by_one(ends, 2000, most=1000, laptop_every=3)
        assert ends.arrived(ends.laptop) == ends.made
