"""A laptop that is off for a day: the worker goes on, and the laptop catches up."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store
from stepping import Attempts, Clock, SteppedEnd, fast_folder

from protocol.queue import encode_script
from protocol.results import Results
from protocol.states import Result
from protocol.wire import Role
from syncd.config import Key

STAGES = (
    '[stages.train]\ncommand = "train"\ngpu = 0.5\n[stages.test]\ncommand = "test"\ngpu = 0.5\n'
)
RUNS = 12
DAY = 86400.0
STEP = 900.0


class Pair:
    """A laptop and a VM on a remote that works, and a clock that is ours."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.folder, self.store, self.key = folder, Store(), Key.new()
        self.rng = random.Random(7)
        self.laptop = self.end("laptop", Role.CONTROLLER)
        self.vm = self.end("vm", Role.WORKER)
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        self.largest = 0

    def end(self, name: str, role: Role) -> SteppedEnd:
        remote = FakeRemote(self.store, Faults(self.rng), name)
        return SteppedEnd(self.folder / name, role, remote, self.key)

    def rounds(self, *ends: SteppedEnd, seconds: float = 1.0) -> None:
        """A round of every loop of each end."""
        for end in ends:
            end.start()
            # A worker that was away for long first looks whether it was replaced.
            for name in ("main", *end.loops(), *end.loops()):
                end.step(name)
        self.clock.advance(seconds)
        self.largest = max(self.largest, self.store.count())

    def work(self) -> None:
        """What the stages do in a quarter of an hour: each writes, and some end."""
        for folder in sorted(self.attempts.alive):
            self.attempts.write(folder, f"{folder.parent.name} {self.rng.random()}\n".encode() * 20)
            if self.rng.random() < 0.5:
                made = self.vm.layout.artifacts / folder.parent.name
                (made / "weights.bin").write_bytes(self.rng.randbytes(70_000))
                self.attempts.finish(folder)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with fast_folder() as folder:
        pair = Pair(folder, monkeypatch)
        yield pair
        pair.laptop.kill()
        pair.vm.kill()


def appended(pair: Pair) -> list[str]:
    lines = [f"run:{('train', 'test')[n % 2]}" for n in range(RUNS)]
    lines += [encode_script(f"echo {n}") for n in range(RUNS)]
    pair.laptop.layout.queue.write_text("".join(f"{line}\n" for line in lines))
    return lines


def test_a_laptop_that_was_off_for_a_day_catches_up(pair: Pair) -> None:
    lines = appended(pair)
    for _ in range(10):
        pair.rounds(pair.laptop, pair.vm)
    pair.laptop.kill()

    began = pair.clock.ahead
    while pair.clock.ahead - began < DAY:
        pair.work()
        pair.rounds(pair.vm, seconds=STEP)
    assert len(pair.vm.journal()) == len(lines)
    assert not pair.vm.open_commands()
    assert len(pair.laptop.journal()) < len(lines)
    assert pair.largest < 1000

    for _ in range(20):
        pair.rounds(pair.laptop, pair.vm)
    caught_up(pair, lines)
    for path in pair.vm.layout.inbox.glob("*.log"):
        assert (pair.laptop.layout.inbox / path.name).read_bytes() == path.read_bytes()


def test_a_new_laptop_has_it_all_from_the_remote_alone(pair: Pair) -> None:
    lines = appended(pair)
    for _ in range(10):
        pair.rounds(pair.laptop, pair.vm)
    queue = pair.laptop.layout.queue.read_bytes()
    pair.laptop.kill()
    shutil.rmtree(pair.laptop.layout.root)

    began = pair.clock.ahead
    while pair.clock.ahead - began < DAY:
        pair.work()
        pair.rounds(pair.vm, seconds=STEP)

    pair.laptop = pair.end("new-laptop", Role.CONTROLLER)
    pair.laptop.layout.serve.mkdir()
    (pair.laptop.layout.serve / "stages.toml").write_text(STAGES)
    pair.laptop.layout.queue.write_bytes(queue)
    for _ in range(20):
        pair.rounds(pair.laptop, pair.vm)
    caught_up(pair, lines)
    with open(pair.laptop.layout.queue, "a") as file:
        file.write("run:train\n")
    for _ in range(20):
        pair.rounds(pair.laptop, pair.vm)
        pair.work()
    assert pair.laptop.journal()[len(lines) + 1].line == "run:train"


def log_tail(here: bytes, there: bytes) -> bool:
    """Whether a log is here from some byte on.

    What the laptop before had acknowledged is on no remote any more, and its absence is told.
    """
    told = re.match(rb"\n\[syncd\] (\d+) bytes of this log are missing here\n", here)
    return here[told.end() :] == there[int(told[1]) :] if told else here == there


def caught_up(pair: Pair, lines: list[str]) -> None:
    """Check that the laptop has all that the VM has."""
    journal = pair.laptop.journal()
    assert [journal[n].line for n in sorted(journal)] == lines
    assert journal == pair.vm.journal()
    assert {record.result for record in journal.values()} == {Result.SUCCESS}
    assert all(count == 1 for count in pair.attempts.spawned.values())
    assert len(Results.load(pair.laptop.layout.results).runs) == len(lines)
    logs = sorted(path.name for path in pair.vm.layout.inbox.glob("*.log"))
    assert len(logs) == 2 + RUNS
    for name in logs:
        here, there = (end.layout.inbox / name for end in (pair.laptop, pair.vm))
        assert log_tail(here.read_bytes(), there.read_bytes())
    made = list(pair.vm.layout.artifacts.rglob("weights.bin"))
    assert made
    for path in made:
        copy = pair.laptop.layout.artifacts / path.relative_to(pair.vm.layout.artifacts)
        assert copy.read_bytes() == path.read_bytes()
