"""States in the place of packs, with both ends driven by hand, one round at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from protocol.paths import Layout
from protocol.states import Result, State
from protocol.wire import Kind, ObjectName, Role
from syncd.config import load_settings
from syncd.controller import Controller
from syncd.daemon import Daemon
from syncd.delivery import link as link_module
from syncd.setup import initialise
from syncd.worker import Worker

STAGES = """
[stages.talk]
command = "sh talk.sh"
gpu = 0
[stages.keep]
command = "cat word.txt; while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done"
gpu = 0
"""
TALK = """
for n in 1 2 3 4 5; do echo $SYNCD_RUN_ID line $n; done
echo small $SYNCD_RUN_ID > $SYNCD_ARTIFACT_DIR/small.txt
head -c 200000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
echo kept $SYNCD_RUN_ID > $SYNCD_STORE/kept.txt
"""


class ByHand:
    """Both ends in this process, without their threads."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.folder = folder
        self.remote = folder / "remote"
        initialise(Layout(folder / "laptop"), role=Role.CONTROLLER, remote=str(self.remote))
        self.laptop = self.open(Controller, "laptop")
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        (self.laptop.layout.serve / "talk.sh").write_text(TALK)
        (self.laptop.layout.serve / "word.txt").write_text("first\n")
        self.vms = 0
        self.vm = self.new_vm()

    def open(self, kind: type[Daemon], name: str) -> Daemon:
        layout = Layout(self.folder / name)
        daemon = kind(layout, load_settings(layout, {}, {}))
        daemon.open(self.stack)
        return daemon

    def new_vm(self) -> Daemon:
        self.vms += 1
        layout = Layout(self.folder / f"vm{self.vms}")
        key = self.laptop.layout.key
        initialise(layout, role=Role.WORKER, remote=str(self.remote), key_file=key)
        return self.open(Worker, f"vm{self.vms}")

    def round(self, *daemons: Daemon) -> None:
        for daemon in daemons or (self.laptop, self.vm):
            daemon.tick()
            daemon.bulk()
            while daemon.link.push():
                pass
            daemon.look_for_writers()
            daemon.step(daemon.pull_loop)

    def append(self, *lines: str) -> None:
        with open(self.laptop.layout.queue, "a") as queue:
            queue.writelines(f"{line}\n" for line in lines)

    def until_ended(self, number: int) -> Result:
        def ended() -> Result | None:
            self.round()
            record = self.laptop.journal.newest.get(number)
            return record.result if record and record.state is State.ENDED else None

        return eventually(ended, within=30, what=f"command {number} did not end")

    def objects(self, daemon: Daemon, kind: Kind) -> list[ObjectName]:
        folder = self.remote / str(daemon.link.writer)
        names = [ObjectName.parse(entry.name) for entry in folder.iterdir()]
        return sorted(n for n in names if n is not None and n.kind is kind)


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ByHand]:
    monkeypatch.setattr(link_module, "STATE_PACKS", 6)
    with contextlib.ExitStack() as stack:
        yield ByHand(tmp_path, stack)


def test_the_remote_stays_small_and_a_fresh_worker_finds_everything(by_hand: ByHand) -> None:
    ends = by_hand
    for number in range(1, 13):
        ends.append("run:talk")
        assert ends.until_ended(number) is Result.SUCCESS
    for end in (ends.laptop, ends.vm):
        assert len(ends.objects(end, Kind.PACK)) <= 12
        assert len(ends.objects(end, Kind.STATE)) == 1
    log = (ends.laptop.layout.inbox / "talk.log").read_bytes()
    assert log == (ends.vm.layout.inbox / "talk.log").read_bytes()

    old = ends.vm
    ends.vm = ends.new_vm()
    ends.append("run:talk")
    assert ends.until_ended(13) is Result.SUCCESS
    run_ids = [record.run_id for _, record in sorted(ends.laptop.journal.newest.items())]
    for run_id in run_ids[:12]:
        for name in ("small.txt", "large.bin"):
            made = (old.layout.artifacts / run_id / name).read_bytes()
            assert (ends.vm.layout.artifacts / run_id / name).read_bytes() == made
            assert (ends.laptop.layout.artifacts / run_id / name).read_bytes() == made
    assert [run.run_id for _, run in ends.vm.results.since(0)] == run_ids
    assert ends.vm.journal.newest.keys() == ends.laptop.journal.newest.keys()


def test_a_laptop_that_was_away_gets_every_line_of_the_log_once(by_hand: ByHand) -> None:
    ends = by_hand
    ends.append(*["run:talk"] * 10)
    for _ in range(3):  # it reads what an earlier one may have numbered, before it numbers
        ends.round(ends.laptop)

    def all_ended() -> bool:
        ends.round(ends.vm)
        records = ends.vm.journal.newest.values()
        return sum(record.state is State.ENDED for record in records) == 10

    eventually(all_ended, within=60, what="the worker did not go through its queue alone")
    for _ in range(5):
        ends.round(ends.vm)
    assert ends.objects(ends.vm, Kind.STATE)
    assert 1 not in [name.seq for name in ends.objects(ends.vm, Kind.PACK)]
    assert ends.until_ended(10) is Result.SUCCESS
    log = (ends.laptop.layout.inbox / "talk.log").read_bytes()
    assert log == (ends.vm.layout.inbox / "talk.log").read_bytes()


def test_a_reader_that_is_behind_in_the_middle_of_a_log_reads_no_line_twice(
    by_hand: ByHand,
) -> None:
    ends = by_hand
    ends.append("run:talk", "run:talk")
    ends.until_ended(2)
    ends.append(*["run:talk"] * 10)
    for _ in range(3):  # it reads what an earlier one may have numbered, before it numbers
        ends.round(ends.laptop)
    for _ in range(3):  # read something, and acknowledge nothing
        ends.vm.tick()
        ends.vm.link.push()
        ends.laptop.link.pull()

    def all_ended() -> bool:
        ends.round(ends.vm)
        records = ends.vm.journal.newest.values()
        return sum(record.state is State.ENDED for record in records) == 12

    eventually(all_ended, within=60, what="the worker did not go through its queue alone")
    assert ends.until_ended(12) is Result.SUCCESS
    log = (ends.laptop.layout.inbox / "talk.log").read_bytes()
    assert log == (ends.vm.layout.inbox / "talk.log").read_bytes()


def test_a_run_that_is_resumed_finds_the_payload_that_it_began_with(by_hand: ByHand) -> None:
    ends = by_hand
    ends.append("run:keep")

    def started() -> bool:
        ends.round()
        return 1 in ends.laptop.journal.newest and ends.laptop.journal.newest[1].attempt == 1

    eventually(started, within=30, what="the run did not start")
    for number in range(2, 12):
        (ends.laptop.layout.serve / "word.txt").write_text(f"word {number}\n")
        ends.append("run:talk")
        assert ends.until_ended(number) is Result.SUCCESS
    assert ends.objects(ends.laptop, Kind.STATE)
    (ends.vm.layout.store / "go").touch()  # ends what is left on the first machine
    ends.vm = ends.new_vm()
    ends.round()
    (ends.vm.layout.store / "go").touch()
    assert ends.until_ended(1) is Result.SUCCESS
    assert ends.laptop.journal.newest[1].attempt == 2
    assert b"\nfirst\n" in (ends.vm.layout.inbox / "keep.log").read_bytes()


def test_commands_are_not_run_again_by_a_controller_without_a_memory(by_hand: ByHand) -> None:
    ends = by_hand
    ends.append("run:talk", "run:talk")
    ends.until_ended(2)
    before = ends.laptop
    queue = before.layout.queue.read_text()
    initialise(
        Layout(ends.folder / "new"),
        role=Role.CONTROLLER,
        remote=str(ends.remote),
        key_file=before.layout.key,
    )
    ends.laptop = ends.open(Controller, "new")
    ends.laptop.layout.queue.write_text(queue)
    for name in ("stages.toml", "talk.sh", "word.txt"):
        (ends.laptop.layout.serve / name).write_bytes((before.layout.serve / name).read_bytes())
    ends.append("run:talk")
    assert ends.until_ended(3) is Result.SUCCESS
    assert set(ends.vm.journal.newest) == {1, 2, 3}
    assert json.loads(ends.vm.state.rows("SELECT message FROM commands")[-1][0])["number"] == 3
