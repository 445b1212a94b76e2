"""Two ends with two remotes, a bridge and a slower one, that come and go."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store, Unreliable
from stepping import Attempts, Clock, SteppedEnd, fast_folder

from protocol.queue import encode_script
from protocol.states import Result, State
from protocol.wire import Kind, ObjectName, Role
from syncd.config import Key
from syncd.rclone.profiles import DRIVE, LOCAL, Profile
from syncd.rclone.remotes import Lane, Remotes

STAGES = '[stages.train]\ncommand = "train"\n'
LARGE = 200_000


class Way(Unreliable):
    """How one end reaches one remote: with a switch."""

    def __init__(self, store: Store, who: str, profile: Profile, rng: random.Random) -> None:
        self.faults = Faults(rng)
        super().__init__(FakeRemote(store, Faults(rng), who), self.faults, who)
        self._profile = profile

    def profile(self) -> Profile:
        return self._profile

    def switch(self, on: bool) -> None:
        self.faults.error = 0.0 if on else 1.0


class TwoWays:
    """A laptop, workers, and two remotes between them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        monkeypatch.setattr("syncd.worker.FENCE_PATIENCE_SECONDS", 0.0)
        self.folder, self.key, self.rng = folder, Key.new(), random.Random(5)
        self.bridge, self.drive = Store(), Store()
        self.ends: list[SteppedEnd] = []
        self.ways: dict[str, tuple[Way, Way]] = {}
        self.laptop = self.end("laptop", Role.CONTROLLER)
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        self.vm = self.end("vm", Role.WORKER)
        self.rounds()

    def end(self, name: str, role: Role) -> SteppedEnd:
        fast = Way(self.bridge, name, LOCAL, self.rng)
        slow = Way(self.drive, name, DRIVE, self.rng)
        remotes = Remotes([Lane(fast), Lane(slow)])
        self.ways[name] = fast, slow
        self.ends.append(SteppedEnd(self.folder / name, role, remotes, self.key))
        return self.ends[-1]

    def switch(self, end: str, at: int, on: bool) -> None:
        self.ways[end][at].switch(on)

    def append(self, *lines: str) -> None:
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write("".join(f"{line}\n" for line in lines))

    def rounds(self, *ends: SteppedEnd, count: int = 8) -> None:
        for _ in range(count):
            for end in ends or self.ends:
                end.start()
                for name in end.loops():
                    end.step(name)
            self.clock.advance(6.0)

    def finish_all(self) -> None:
        for folder in sorted(self.attempts.alive):
            made = folder.parents[3] / "in" / "artifacts" / folder.parent.name
            (made / "weights.bin").write_bytes(self.rng.randbytes(LARGE))
            self.attempts.finish(folder)


def live(store: Store) -> dict[str, set[ObjectName]]:
    """What of each writer is needed: by its newest state, what is not older."""
    found: dict[str, set[ObjectName]] = {}
    for path in store.files:
        folder, _, file = path.partition("/")
        name = ObjectName.parse(file)
        assert name is not None
        found.setdefault(folder, set()).add(name)
    for folder, names in found.items():
        base = max((n.seq for n in names if n.kind is Kind.STATE), default=0)
        found[folder] = {
            n
            for n in names
            if n.kind is Kind.CHUNK or n.seq > base or (n.kind is Kind.STATE and n.seq == base)
        }
    return found


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoWays]:
    with fast_folder() as folder:
        two = TwoWays(folder, monkeypatch)
        yield two
        for end in two.ends:
            end.kill()


def ended(end: SteppedEnd) -> dict[int, Result | None]:
    return {n: record.result for n, record in end.journal().items() if record.state is State.ENDED}


def test_each_remote_gets_everything(two: TwoWays) -> None:
    (two.laptop.layout.serve / "data.bin").write_bytes(two.rng.randbytes(LARGE))
    two.append("run:train")
    two.rounds()
    two.finish_all()
    two.rounds()
    assert ended(two.laptop) == {1: Result.SUCCESS}
    assert live(two.bridge) == live(two.drive)
    assert any(n.kind is Kind.CHUNK for names in live(two.drive).values() for n in names)


def test_a_worker_whose_tunnel_is_gone_goes_on_by_the_other_remote(two: TwoWays) -> None:
    two.append("run:train")
    two.rounds()
    two.switch("vm", 0, on=False)
    two.append("run:train", encode_script("echo once"))
    two.rounds()
    for _ in range(3):
        two.finish_all()
        two.rounds()
    assert ended(two.laptop) == dict.fromkeys((1, 2, 3), Result.SUCCESS)
    assert two.attempts.spawned.total() == 3
    assert live(two.bridge) != live(two.drive)

    two.switch("vm", 0, on=True)
    two.rounds(count=30)
    two.append("run:train")
    two.rounds()
    two.finish_all()
    two.rounds(count=12)
    assert ended(two.laptop) == dict.fromkeys((1, 2, 3, 4), Result.SUCCESS)
    assert live(two.bridge) == live(two.drive)
    for run in two.vm.layout.artifacts.iterdir():
        kept = two.laptop.layout.artifacts / run.name / "weights.bin"
        assert kept.read_bytes() == (run / "weights.bin").read_bytes()


def test_what_was_on_the_bridge_alone_is_said_again_where_a_new_worker_finds_it(
    two: TwoWays,
) -> None:
    (two.laptop.layout.serve / "data.bin").write_bytes(two.rng.randbytes(LARGE))
    two.append("run:train")
    two.rounds()
    two.switch("vm", 1, on=False)  # nothing is copied from here on
    two.finish_all()
    two.append("run:train")
    two.rounds()
    two.finish_all()
    two.rounds(count=3)
    assert ended(two.laptop) == {1: Result.SUCCESS, 2: Result.SUCCESS}

    two.laptop.kill()  # and the bridge with it
    two.ends.remove(two.laptop)
    two.switch("vm", 0, on=False)
    two.switch("vm", 1, on=True)
    two.rounds(count=30)
    made = {run.name: (run / "weights.bin").read_bytes() for run in _runs(two.vm)}
    assert len(made) == 2
    two.vm.kill()
    two.ends.remove(two.vm)
    shutil.rmtree(two.vm.layout.root)
    two.attempts.vanish(two.folder)

    new = two.end("new", Role.WORKER)
    two.switch("new", 0, on=False)
    two.rounds(new, count=12)
    assert ended(new) == {1: Result.SUCCESS, 2: Result.SUCCESS}
    assert {run.name: (run / "weights.bin").read_bytes() for run in _runs(new)} == made
    assert two.attempts.spawned.total() == 2


def _runs(end: SteppedEnd) -> list[Path]:
    return [run for run in end.layout.artifacts.iterdir() if (run / "weights.bin").exists()]


def test_a_shell_command_waits_until_workers_can_meet(two: TwoWays) -> None:
    two.switch("vm", 1, on=False)
    two.append(encode_script("echo once"), "run:train")
    two.rounds()
    assert next(iter(two.attempts.alive.values())).startswith("train")
    assert len(two.attempts.alive) == 1
    two.switch("vm", 1, on=True)
    two.rounds(count=30)
    assert len(two.attempts.alive) == 2


def test_two_workers_that_meet_on_the_last_remote_alone_run_a_shell_command_once(
    two: TwoWays,
) -> None:
    two.switch("vm", 0, on=False)
    new = two.end("new", Role.WORKER)
    new.start()
    two.append(encode_script("echo once"))
    two.rounds()
    two.finish_all()
    two.rounds()
    assert two.attempts.spawned.total() == 1
    assert ended(two.laptop) == {1: Result.SUCCESS}
    assert two.vm.fenced


@pytest.mark.parametrize("seed", range(6))
def test_remotes_that_come_and_go_at_random_lose_nothing(two: TwoWays, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(1, 13):
        two.append("run:train" if number % 3 else encode_script(f"echo {number}"))
        for end in ("laptop", "vm"):
            two.switch(end, 0, on=rng.random() < 0.6)
            two.switch(end, 1, on=rng.random() < 0.6)
        two.rounds(count=rng.randrange(1, 5))
        two.finish_all()
    for end in ("laptop", "vm"):
        two.switch(end, 0, on=True)
        two.switch(end, 1, on=True)
    for _ in range(14):
        two.rounds(count=4)
        two.finish_all()
    two.rounds(count=20)
    assert ended(two.laptop) == dict.fromkeys(range(1, 13), Result.SUCCESS)
    assert two.attempts.spawned.total() == 12
    assert live(two.bridge) == live(two.drive)
    for log in two.vm.layout.inbox.glob("*.log"):
        assert (two.laptop.layout.inbox / log.name).read_bytes() == log.read_bytes()
