"""How often each end looks at the remote and says something, by a clock that is the test's.

Loops are run as the daemon's threads run them: each when its interval is over, or when it is woken.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store
from stepping import Attempts, Clock, SteppedEnd, fast_folder

from protocol.publish import publish_json
from protocol.wire import Role
from syncd.config import Key
from syncd.rclone.profiles import BRIDGE, DRIVE, Profile

STAGES = '[stages.train]\ncommand = "train"\n'
MINUTE = 60.0
# What an upload takes over WebDAV: a folder, the file, a look at it.
REQUESTS = {"list": 1, "read": 1, "upload": 3, "delete": 1}


class Counted(FakeRemote):
    """A remote that counts what is asked of it."""

    def __init__(self, store: Store, who: str, profile: Profile) -> None:
        super().__init__(store, Faults(random.Random(0)), who)
        self.calls: Counter[str] = Counter()
        self._profile = profile

    def profile(self) -> Profile:
        return self._profile

    def read(self, path, *, limit):
        self.calls["read"] += 1
        return super().read(path, limit=limit)

    def upload(self, source, path):
        self.calls["upload"] += 1
        super().upload(source, path)

    def delete(self, folder, names):
        self.calls["list"] += bool(names)
        self.calls["delete"] += len(names)
        super().delete(folder, names)

    def list(self, folder):
        self.calls["list"] += 1
        return super().list(folder)

    def requests(self) -> int:
        return sum(REQUESTS[what] * count for what, count in self.calls.items())


class Timed:
    """Two ends whose loops run when they are due."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.now, self.due = 0.0, dict[tuple[str, str], float]()
        self.remotes = {
            role: Counted(store, str(role), profile)
            for store in [Store()]
            for role in (Role.CONTROLLER, Role.WORKER)
        }
        key = Key.new()
        self.ends = {
            role: SteppedEnd(folder / str(role), role, remote, key)
            for role, remote in self.remotes.items()
        }
        self.laptop, self.vm = self.ends[Role.CONTROLLER], self.ends[Role.WORKER]
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        for end in self.ends.values():
            end.start()

    def run(self, seconds: float) -> None:
        """Let so much time go by."""
        until = self.now + seconds
        while self.now < until:
            for end in self.ends.values():
                for loop in end.daemon._loops():  # type: ignore[union-attr]
                    key = (str(end.role), loop.name)
                    rested = self.due.get(key, 0.0)
                    if not (loop.wake.is_set() or self.now >= rested):
                        continue
                    loop.wake.clear()
                    end.daemon.step(loop)  # type: ignore[union-attr]
                    self.due[key] = self.now + loop.interval()
            step = max(min(self.due.values()) - self.now, 0.05)
            self.now += step
            self.clock.advance(step)

    def woken(self, loop: str) -> None:
        """What a watcher does when something has changed."""
        for end in self.ends.values():
            for each in end.daemon._loops():  # type: ignore[union-attr]
                if each.name == loop:
                    each.wake.set()

    def append(self, line: str) -> None:
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write(f"{line}\n")
        self.woken("main")

    def forget(self) -> None:
        for remote in self.remotes.values():
            remote.calls.clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Timed]:
    with fast_folder() as folder:
        timed = Timed(folder, monkeypatch, getattr(request, "param", BRIDGE))
        yield timed
        for end in timed.ends.values():
            end.kill()


@pytest.mark.parametrize(("timed", "most"), [(BRIDGE, 30), (DRIVE, 6)], indirect=["timed"])
def test_ends_that_have_nothing_to_do_ask_little_of_the_remote(timed: Timed, most: int) -> None:
    timed.append("run:train")
    timed.run(30)
    for folder in list(timed.attempts.alive):
        timed.attempts.finish(folder)
    timed.run(12 * MINUTE)
    assert not timed.vm.open_commands()
    timed.forget()
    timed.run(20 * MINUTE)
    for remote in timed.remotes.values():
        assert 0 < remote.requests() / 20 <= most, remote.calls


@pytest.mark.parametrize("timed", [BRIDGE, DRIVE], indirect=True)
def test_a_worker_that_has_nothing_to_do_is_not_taken_for_gone(timed: Timed) -> None:
    for _ in range(15):
        timed.run(MINUTE)
        assert "NOT HEARD" not in timed.laptop.layout.status.read_text()


def test_while_something_runs_the_remote_is_looked_at_often_for_however_long(timed: Timed) -> None:
    timed.append("run:train")
    timed.run(11 * MINUTE)
    assert timed.attempts.alive
    timed.forget()
    timed.run(MINUTE)
    for remote in timed.remotes.values():
        assert remote.calls["list"] >= 0.9 * MINUTE / BRIDGE.poll_seconds


def test_after_a_quiet_time_a_line_is_taken_within_one_look_and_then_all_goes_fast(
    timed: Timed,
) -> None:
    timed.run(20 * MINUTE)
    timed.append("run:train")
    timed.run(BRIDGE.idle_poll_seconds + 1)
    assert timed.attempts.alive
    timed.forget()
    timed.run(10)
    assert timed.remotes[Role.WORKER].calls["list"] >= 0.9 * 10 / BRIDGE.poll_seconds


def bar(step: int) -> bytes:
    """What tqdm draws, on a terminal of 100 columns."""
    done = step / 60
    blocks = "\u2588" * int(done / 3)
    text = f"\rtrain: {done:5.1f}%|{blocks:33}| {step}/6000 [10.00it/s, loss={1 / (step + 1):.4f}]"
    return text.encode()


def test_a_bar_that_is_drawn_on_and_on_costs_a_small_part_of_its_bytes(timed: Timed) -> None:
    timed.append("run:train")
    timed.run(5)
    (folder,) = timed.attempts.alive
    store, drawn = timed.remotes[Role.WORKER].store, 0
    sent, bodies = set(store.files), 0
    log = timed.vm.layout.log("train")
    for at in range(0, 3000, 10):  # ten times a second, for five minutes
        draws = b"".join(map(bar, range(at, at + 10)))
        drawn += len(draws)
        with open(log, "ab") as file:
            file.write(draws)
        timed.woken("push")
        timed.run(1.0)
        new = set(store.files) - sent
        sent |= new
        bodies += sum(len(store.files[path][0].body) for path in new if path.startswith("w-"))
    assert bodies <= drawn / 20
    timed.attempts.finish(folder)
    timed.run(10)
    assert bar(2999)[1:] in timed.laptop.layout.log("train").read_bytes()


def test_a_line_that_has_ended_goes_at_once_whatever_bar_was_drawn_before(timed: Timed) -> None:
    timed.append("run:train")
    timed.run(5)
    log, kept = (end.layout.log("train") for end in (timed.vm, timed.laptop))
    for step in range(40):
        with open(log, "ab") as file:
            file.write(bar(step))
        timed.woken("push")
        timed.run(1.0)
    assert bar(39)[1:] not in kept.read_bytes()
    with open(log, "ab") as file:
        file.write(b"\nan epoch is over\n")
    timed.woken("push")
    timed.run(BRIDGE.gather_seconds + BRIDGE.poll_seconds)
    assert kept.read_bytes().endswith(bar(39)[1:] + b"\nan epoch is over\n")


def test_progress_is_told_soon_at_first_and_now_and_then_later(timed: Timed) -> None:
    timed.append("run:train")
    timed.run(5)
    (folder,) = timed.attempts.alive
    told: list[int] = []
    for step in range(120):
        publish_json(folder.parent / "progress.json", {"step": step, "total": 120})
        timed.run(1.0)
        status = timed.laptop.daemon.state.get("status")  # type: ignore[union-attr]
        progress = status["running"][0]["progress"]
        if progress and progress["step"] not in told:
            told.append(progress["step"])
    assert told[0] <= 3
    assert 6 <= len(told) <= 20
    assert max(b - a for a, b in pairwise(told)) <= 22
