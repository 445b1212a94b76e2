"""A worker with nothing to do leaves, but never with something that nobody else has."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ends import Ends
from fake_remote import FakeRemote, Faults, Store, Unreliable
from stepping import Attempts, Clock, SteppedEnd, fast_folder
from waiting import eventually

from protocol.errors import DataError, ExitCode
from protocol.paths import Layout
from protocol.results import Results
from protocol.states import Result
from protocol.wire import Role
from syncd.config import Key
from syncd.leaving import (
    Outlook,
    Quiet,
    Reason,
    Verdict,
    judge,
    read_left,
    told_idle,
    write_left,
)
from syncd.rclone.profiles import BRIDGE, DRIVE, Profile
from syncd.view import read_status

AFTER = 600.0
STAGES = '[stages.train]\ncommand = "train"\n'
READY = Outlook(quiet=AFTER, sent=True, durable=False, heard=True, kept=True)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.LEAVE),
        ({"quiet": AFTER - 1}, Verdict.BUSY),
        ({"sent": False}, Verdict.NOT_SENT),
        ({"sent": False, "durable": True}, Verdict.NOT_SENT),
        ({"heard": False}, Verdict.NOT_HEARD),
        ({"heard": False, "durable": True}, Verdict.LEAVE),
        ({"kept": False}, Verdict.NOT_KEPT),
        ({"kept": False, "durable": True, "heard": False}, Verdict.NOT_KEPT),
    ],
)
def test_it_leaves_when_nothing_of_it_is_needed_any_more(change, verdict):
    assert judge(replace(READY, **change), AFTER) is verdict


def test_it_is_quiet_since_the_last_thing_that_ran_waited_or_happened(monkeypatch):
    clock, quiet = Clock(monkeypatch), Quiet()
    clock.advance(50)
    assert quiet.look(busy=True, mark=1) == 0
    clock.advance(50)
    assert 50 <= quiet.look(busy=False, mark=1) < 51
    assert quiet.look(busy=False, mark=2) < 1
    clock.advance(50)
    assert 50 <= quiet.look(busy=False, mark=2) < 51
    assert quiet.look(busy=True, mark=2) == 0
    assert quiet.look(busy=False, mark=2) < 1


@pytest.mark.parametrize(
    ("after", "told"), [(1800, "30 min"), (90, "1 min 30 s"), (7200, "2 h"), (5, "5 s")]
)
def test_its_last_status_says_for_how_long_there_was_nothing_to_do(after, told):
    assert told_idle(after) == f"stopped: nothing to do for {told}"


def test_how_it_left_is_read_as_it_was_written(tmp_path):
    layout = Layout(tmp_path)
    layout.private.mkdir()
    assert read_left(layout) is None
    write_left(layout, Reason.IDLE, "stopped: nothing to do for 30 min")
    left = read_left(layout)
    assert left is not None
    assert (left.reason, left.why) == (Reason.IDLE, "stopped: nothing to do for 30 min")
    assert left.time <= time.time()
    layout.left.write_text("{")
    with pytest.raises(DataError, match=r"read how the worker left: .*left\.json"):
        read_left(layout)


class FakePair:
    """A laptop and a VM that is to leave after ten idle minutes, on a remote of some profile."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.profile = BRIDGE
        self.folder, self.store, self.key = folder, Store(), Key.new()
        self.faults = Faults(random.Random(7))
        self.laptop = self.end("laptop", Role.CONTROLLER)
        self.vm = self.end("vm", Role.WORKER)
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)

    def end(self, name: str, role: Role) -> SteppedEnd:
        remote = Profiled(FakeRemote(self.store, self.faults, name), self.faults, name)
        remote.pair = self
        end = SteppedEnd(self.folder / name, role, remote, self.key)
        end.settings = {"stop_when_idle": AFTER} if role is Role.WORKER else {}
        return end

    def rounds(self, *ends: SteppedEnd, minutes: float) -> None:
        """Rounds of every loop of each end, two a minute; an end that ends does no more."""
        for _ in range(round(minutes * 2)):
            for end in ends:
                end.start()
                for name in ("main", *end.loops(), *end.loops()):
                    if not end.has_ended():
                        end.step(name)
            self.clock.advance(30)

    def append(self, *lines: str) -> None:
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write("".join(f"{line}\n" for line in lines))

    def run_one(self) -> None:
        """Let a run make something, and end."""
        self.append("run:train")
        self.rounds(self.laptop, self.vm, minutes=2)
        (folder,) = self.attempts.alive
        made = self.vm.layout.artifacts / folder.parent.name
        (made / "weights.bin").write_bytes(bytes(range(256)) * 1000)
        self.attempts.finish(folder)
        self.rounds(self.vm, minutes=1)

    def leaving(self) -> str:
        """Why the VM leaves, as the laptop has it."""
        status = read_status(self.laptop.layout)
        return status.leaving if status else ""

    def problems(self) -> tuple[str, ...]:
        """What the VM says is wrong with it, where it is."""
        status = read_status(self.vm.layout)
        return status.problems if status else ()


class Profiled(Unreliable):
    """A remote of the pair's profile."""

    pair: FakePair

    def profile(self) -> Profile:
        return replace(self.pair.profile, transfers=1)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePair]:
    with fast_folder() as folder:
        pair = FakePair(folder, monkeypatch)
        yield pair
        pair.laptop.kill()
        pair.vm.kill()


GOODBYE = "stopped: nothing to do for 10 min"


def test_it_leaves_once_it_was_idle_for_long_and_all_was_received(pair: FakePair) -> None:
    pair.run_one()
    pair.rounds(pair.laptop, pair.vm, minutes=7)
    assert not pair.vm.has_ended()
    assert pair.leaving() == ""
    pair.rounds(pair.laptop, pair.vm, minutes=5)
    assert pair.vm.has_ended()
    assert pair.leaving() == GOODBYE, "it goes only once it was said"
    pair.vm.leave()
    left = read_left(pair.vm.layout)
    assert left is not None
    assert (left.reason, left.why) == (Reason.IDLE, GOODBYE)
    pair.vm.start()
    assert read_left(pair.vm.layout) is None, "another one has begun"


def test_a_worker_that_never_had_anything_to_do_leaves_too(pair: FakePair) -> None:
    pair.rounds(pair.laptop, pair.vm, minutes=12)
    assert pair.vm.has_ended()


def test_nothing_makes_a_worker_leave_that_was_not_asked_to(pair: FakePair) -> None:
    pair.vm.settings = {}
    pair.rounds(pair.laptop, pair.vm, minutes=60)
    assert not pair.vm.has_ended()


def test_it_does_not_leave_while_something_runs_or_waits(pair: FakePair) -> None:
    pair.append("run:train", "run:train")
    pair.rounds(pair.laptop, pair.vm, minutes=30)
    assert len(pair.attempts.alive) == 1
    assert not pair.vm.has_ended()


def test_while_the_laptop_is_off_it_stays_where_the_remote_may_be_the_laptop(
    pair: FakePair,
) -> None:
    pair.run_one()
    pair.laptop.kill()
    pair.rounds(pair.vm, minutes=120)
    assert not pair.vm.has_ended()
    assert any(str(Verdict.NOT_HEARD) in problem for problem in pair.problems())
    pair.rounds(pair.laptop, pair.vm, minutes=3)
    assert pair.vm.has_ended()
    assert pair.leaving() == GOODBYE


def test_on_a_durable_remote_it_leaves_while_the_laptop_is_off_and_nothing_is_lost(
    pair: FakePair,
) -> None:
    pair.profile = DRIVE
    pair.run_one()
    pair.laptop.kill()
    pair.rounds(pair.vm, minutes=12)
    assert pair.vm.has_ended()
    pair.vm.leave()
    pair.rounds(pair.laptop, minutes=3)
    assert pair.leaving() == GOODBYE
    (run,) = Results.load(pair.laptop.layout.results).runs.values()
    assert run.result is Result.SUCCESS
    made = pair.laptop.layout.artifacts / run.run_id / "weights.bin"
    assert made.read_bytes() == bytes(range(256)) * 1000


def test_it_stays_while_its_remote_does_not_answer(pair: FakePair) -> None:
    pair.profile = DRIVE
    pair.run_one()
    pair.faults.error = 1.0
    pair.rounds(pair.vm, minutes=30)
    assert not pair.vm.has_ended()
    pair.faults.error = 0.0
    pair.rounds(pair.vm, minutes=12)
    assert pair.vm.has_ended()


def test_it_stays_while_the_remote_does_not_show_what_it_has_sent(pair: FakePair) -> None:
    pair.profile = DRIVE
    pair.run_one()
    pair.rounds(pair.vm, minutes=8)
    assert pair.vm.daemon is not None
    sent = [path for path in pair.store.files if path.startswith(str(pair.vm.daemon.link.writer))]
    hidden = {path: pair.store.files.pop(path) for path in sent}
    pair.vm.daemon._mend_at = time.monotonic() + 1e6  # nobody says it again meanwhile
    pair.rounds(pair.vm, minutes=10)
    assert not pair.vm.has_ended()
    assert any(str(Verdict.NOT_KEPT) in problem for problem in pair.problems())
    pair.store.files.update(hidden)
    pair.rounds(pair.vm, minutes=1)
    assert pair.vm.has_ended()


def test_a_command_that_comes_before_it_has_said_so_calls_it_off(pair: FakePair) -> None:
    pair.rounds(pair.laptop, pair.vm, minutes=8)
    daemon = pair.vm.daemon
    assert daemon is not None
    while not daemon.status.leaving:  # type: ignore[attr-defined]
        pair.clock.advance(30)
        for name in ("pull", "main", "bulk"):  # but it does not come to say it
            pair.vm.step(name)
    pair.append("run:train")
    for _ in range(3):
        for name in ("main", "serve", "bulk", "push"):
            pair.laptop.step(name)
    pair.rounds(pair.vm, minutes=1)
    assert not pair.vm.has_ended()
    assert len(pair.attempts.alive) == 1
    pair.rounds(pair.laptop, pair.vm, minutes=1)
    assert pair.leaving() == ""


def test_a_command_that_comes_too_late_is_for_a_later_worker(pair: FakePair) -> None:
    pair.rounds(pair.laptop, pair.vm, minutes=12)
    assert pair.vm.has_ended()
    pair.append("run:train")
    pair.rounds(pair.laptop, minutes=1)
    pair.vm.leave()
    later = pair.end("later", Role.WORKER)
    pair.rounds(pair.laptop, later, minutes=2)
    assert len(pair.attempts.alive) == 1
    later.kill()


def test_real_ends_finish_their_work_and_the_worker_leaves(local_ends: Ends) -> None:
    ends = local_ends
    ends.serve(stages='[stages.make]\ncommand = "echo it > $SYNCD_ARTIFACT_DIR/made.txt"\n')
    ends.new_vm().arguments = ["--stop-when-idle", "2s"]
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:make")
    assert ends.ended(1).result is Result.SUCCESS
    # What the laptop says next carries along what it has received, which it says after 30 s else.
    ends.serve(more_txt="more")
    assert ends.vm.wait() == ExitCode.OK
    eventually(lambda: ends.status()["leaving"] == "stopped: nothing to do for 2 s")
    made = ends.laptop.layout.artifacts / ends.journal()[1].run_id / "made.txt"
    assert made.read_text() == "it\n"
    left = read_left(ends.vm.layout)
    assert left is not None
    assert left.reason is Reason.IDLE
    ends.append("run:make")
    ends.vm.start()
    assert ends.ended(2).result is Result.SUCCESS


def test_a_worker_that_is_stopped_says_that_it_was(local_ends: Ends) -> None:
    local_ends.laptop.start()
    local_ends.new_vm().start()
    eventually(lambda: bool(local_ends.status()), within=60)
    assert local_ends.vm.stop() == ExitCode.OK
    left = read_left(local_ends.vm.layout)
    assert left is not None
    assert (left.reason, left.why) == (Reason.STOPPED, "stopped")
