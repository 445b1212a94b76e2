"""Two workers on one folder: what of each counts, step by step, and who runs what."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store
from stepping import Attempts, Clock, SteppedEnd, fast_folder

from protocol.errors import DataError
from protocol.queue import encode_script
from protocol.results import Results
from protocol.states import Result, State
from protocol.wire import Role
from syncd.config import Key
from syncd.worker import SUSPENDED_SECONDS

STAGES = '[stages.train]\ncommand = "train"\n'
SHELL = encode_script("echo once")


class Trio:
    """A laptop, a worker, and others that a test may start beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = Clock(monkeypatch), Attempts(monkeypatch)
        monkeypatch.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        monkeypatch.setattr("syncd.worker.FENCE_PATIENCE_SECONDS", 0.0)
        self.folder, self.store, self.key = folder, Store(), Key.new()
        self.ends: list[SteppedEnd] = []
        self.laptop = self.end("laptop", Role.CONTROLLER)
        self.laptop.layout.serve.mkdir()
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        self.old = self.end("old", Role.WORKER)
        self.rounds(self.laptop, self.old)

    def end(self, name: str, role: Role) -> SteppedEnd:
        remote = FakeRemote(self.store, Faults(random.Random(1)), name)
        self.ends.append(SteppedEnd(self.folder / name, role, remote, self.key))
        return self.ends[-1]

    def append(self, *lines: str) -> None:
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write("".join(f"{line}\n" for line in lines))

    def rounds(self, *ends: SteppedEnd, count: int = 6) -> None:
        for _ in range(count):
            for end in ends:
                end.start()
                for name in end.loops():
                    end.step(name)
            self.clock.advance(6.0)

    def finish_all(self, below: SteppedEnd) -> None:
        for folder in sorted(self.attempts.alive):
            if folder.is_relative_to(below.layout.root):
                self.attempts.finish(folder)

    def agree(self, worker: SteppedEnd) -> None:
        """Check that the laptop and a worker tell the same of every command."""
        assert self.laptop.journal() == worker.journal()
        runs = Results.load(self.laptop.layout.results).runs
        assert runs == Results.load(worker.layout.results).runs


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trio]:
    with fast_folder() as folder:
        trio = Trio(folder, monkeypatch)
        yield trio
        for end in trio.ends:
            end.kill()


def test_what_a_fenced_worker_said_and_its_successor_did_not_read_counts_no_more(
    trio: Trio,
) -> None:
    trio.append("run:train")
    trio.rounds(trio.laptop, trio.old)
    trio.laptop.step("pull")
    new = trio.end("new", Role.WORKER)
    new.start()
    trio.finish_all(trio.old)
    for name in ("main", "bulk", "push", "bulk", "push"):
        trio.old.step(name)  # it has not looked for others since
    trio.laptop.step("pull")
    assert trio.laptop.journal()[1].result is Result.SUCCESS

    trio.rounds(trio.laptop, new)
    record = trio.laptop.journal()[1]
    assert (record.state, record.worker) == (State.STARTED, str(new.daemon.link.writer))  # type: ignore[union-attr]
    trio.finish_all(new)
    trio.rounds(trio.laptop, new)
    assert trio.laptop.journal()[1].worker == record.worker
    trio.agree(new)


def test_a_shell_command_is_not_started_once_a_successor_may_know_nothing_of_it(
    trio: Trio,
) -> None:
    trio.append(SHELL)
    trio.laptop.step("main")
    trio.laptop.step("push")
    trio.old.step("pull")
    new = trio.end("new", Role.WORKER)
    new.start()
    for name in ("main", "push", "main", "main"):
        trio.old.step(name)
    assert trio.old.journal()[1].state is State.CLAIMED
    trio.rounds(trio.laptop, new)
    trio.rounds(trio.old)
    assert trio.old.fenced
    assert trio.attempts.spawned.total() == 1
    trio.finish_all(new)
    trio.rounds(trio.laptop, new)
    assert trio.laptop.journal()[1].result is Result.SUCCESS
    trio.agree(new)


def test_a_shell_command_that_a_predecessor_claimed_is_lost(trio: Trio) -> None:
    trio.append(SHELL)
    trio.rounds(trio.laptop, trio.old)
    assert trio.attempts.spawned.total() == 1
    trio.old.kill()
    new = trio.end("new", Role.WORKER)
    trio.rounds(trio.laptop, new)
    record = trio.laptop.journal()[1]
    assert record.result is Result.LOST
    assert record.cause.startswith("VM gone: w-000001-")
    assert "last heard" in record.cause
    assert trio.attempts.spawned.total() == 1


def test_a_payload_that_a_run_was_given_unheard_is_there_for_who_takes_over(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 1)
    trio.append("run:train")
    trio.laptop.step("main")
    trio.laptop.step("bulk")
    trio.laptop.step("push")
    trio.rounds(trio.old)
    assert trio.old.journal()[1].snapshot == 1
    (trio.laptop.layout.serve / "new.txt").write_text("an edit")
    for name in ("serve", "bulk", "push", "bulk"):  # it has not heard of the claim
        trio.laptop.step(name)
    trio.old.kill()
    new = trio.end("new", Role.WORKER)
    trio.rounds(trio.laptop, new)
    record = trio.laptop.journal()[1]
    assert (record.state, record.attempt, record.snapshot) == (State.STARTED, 2, 1)
    trio.finish_all(new)
    trio.rounds(trio.laptop, new, count=12)
    assert trio.laptop.daemon.served.sent() == [2]  # type: ignore[union-attr]


def test_a_resumed_run_tells_why_its_last_attempt_has_no_end(trio: Trio) -> None:
    trio.append("run:train")
    trio.rounds(trio.laptop, trio.old)
    (folder,) = trio.attempts.alive
    trio.attempts.write(folder, b"loss 0.25\n")
    trio.rounds(trio.old)
    trio.old.kill()
    new = trio.end("new", Role.WORKER)
    trio.rounds(trio.laptop, new)
    record = trio.laptop.journal()[1]
    assert (record.state, record.attempt) == (State.STARTED, 2)
    assert record.cause.startswith("attempt 1: VM gone: w-000001-")
    assert "last line: loss 0.25" in record.cause


def test_a_shell_command_that_someone_unreadable_may_have_run_is_lost(trio: Trio) -> None:
    """Its claim was deleted from the remote: the controller's acknowledgement tells of it."""
    trio.append(SHELL, "run:train")
    trio.rounds(trio.laptop, trio.old)
    old = str(trio.old.daemon.link.writer)  # type: ignore[union-attr]
    trio.old.kill()
    for path in [path for path in trio.store.files if path.startswith(old)]:
        del trio.store.files[path]
    new = trio.end("new", Role.WORKER)
    trio.rounds(trio.laptop, new)
    journal = new.journal()
    assert journal[1].result is Result.LOST
    assert "cannot be read" in journal[1].cause
    assert journal[2].state is State.STARTED
    trio.append(encode_script("echo later"))
    trio.rounds(trio.laptop, new)
    trio.finish_all(new)
    trio.rounds(trio.laptop, new)
    assert new.journal()[3].result is Result.SUCCESS


def test_a_controller_numbers_nothing_after_what_it_cannot_read(trio: Trio) -> None:
    trio.append("run:train")
    trio.rounds(trio.laptop, trio.old)
    old = str(trio.laptop.daemon.link.writer)  # type: ignore[union-attr]
    trio.laptop.kill()
    for path in [path for path in trio.store.files if path.startswith(old)]:
        del trio.store.files[path]
    new = trio.end("another", Role.CONTROLLER)
    new.layout.serve.mkdir()
    new.layout.queue.write_text("run:train\n")
    with pytest.raises(DataError, match=f"what {old} sent"):
        new.start()
    trio.rounds(trio.old)
    assert trio.attempts.spawned.total() == 1
    assert len(trio.old.journal()) == 1


def test_a_worker_that_wakes_up_looks_for_a_successor_before_it_starts_anything(
    trio: Trio,
) -> None:
    trio.append("run:train")
    trio.laptop.step("main")
    trio.laptop.step("bulk")
    trio.laptop.step("push")
    trio.old.step("pull")
    trio.old.step("bulk")
    new = trio.end("new", Role.WORKER)
    trio.rounds(new)
    trio.clock.advance(SUSPENDED_SECONDS + 1)
    trio.old.step("main")
    assert not any(f.is_relative_to(trio.old.layout.root) for f in trio.attempts.alive)
    trio.old.step("pull")
    trio.old.step("main")
    assert trio.old.fenced
    fence = json.loads(trio.old.layout.fence.read_bytes())
    assert fence["by"] == str(new.daemon.link.writer)  # type: ignore[union-attr]


def test_a_worker_that_was_fenced_stays_so_without_its_remote(trio: Trio) -> None:
    trio.append("run:train")
    trio.rounds(trio.laptop, trio.old)
    new = trio.end("new", Role.WORKER)
    trio.rounds(new)
    trio.old.step("pull")
    trio.old.kill()
    trio.store.files.clear()
    trio.old.start()
    trio.old.step("main")
    assert trio.old.fenced


def test_a_new_incarnation_in_the_same_folder_is_not_held_up_by_an_old_fence(trio: Trio) -> None:
    trio.append("run:train")
    trio.rounds(trio.laptop, trio.old)
    trio.rounds(trio.end("new", Role.WORKER))
    trio.rounds(trio.old)
    assert trio.old.layout.fence.exists()
    trio.old.kill()
    (trio.old.layout.private / "state.db").unlink()
    trio.old.fenced = False
    trio.rounds(trio.old)
    assert not trio.old.layout.fence.exists()
    assert trio.old.daemon is not None
    assert trio.old.daemon.fenced is None


def test_an_end_that_is_an_older_copy_of_itself_is_told_so(trio: Trio, tmp_path: Path) -> None:
    for end in (trio.laptop, trio.old):
        trio.append("run:train")
        trio.rounds(trio.laptop, trio.old)
        end.kill()
        shutil.copytree(end.layout.root, tmp_path / end.role)
        trio.append(SHELL)
        trio.rounds(trio.laptop, trio.old)
        trio.finish_all(trio.old)
        trio.rounds(trio.laptop, trio.old)
        spawned = trio.attempts.spawned.total()
        end.kill()
        shutil.rmtree(end.layout.root)
        shutil.copytree(tmp_path / end.role, end.layout.root)
        with pytest.raises(DataError, match="older copy"):
            end.start()
        (end.layout.private / "state.db").unlink()
        trio.rounds(trio.laptop, trio.old)
        trio.finish_all(trio.old)
        trio.rounds(trio.laptop, trio.old)
        assert trio.attempts.spawned.total() == spawned
        trio.agree(trio.old)


def test_a_claim_that_went_to_another_folder_is_not_acted_on(trio: Trio) -> None:
    """As when the remote is a mount that was not there for a while."""
    real = dict(trio.store.files)
    trio.append(SHELL)
    trio.laptop.step("main")
    trio.laptop.step("push")
    trio.old.step("pull")
    kept = dict(trio.store.files)
    trio.store.files.clear()
    trio.rounds(trio.old)
    assert trio.old.journal()[1].state is State.CLAIMED
    assert not trio.attempts.spawned
    trio.store.files.update(kept | real)


def test_what_went_to_another_folder_is_said_again(trio: Trio) -> None:
    there = dict(trio.store.files)
    trio.append("run:train")
    trio.laptop.step("main")
    trio.laptop.step("push")
    trio.store.files.clear()
    trio.store.files.update(there)
    for line in ("run:train", "run:train"):
        trio.append(line)
        trio.rounds(trio.laptop, trio.old)
    assert not trio.attempts.spawned
    assert trio.old.daemon is not None
    assert any("waiting for pack" in told for told in trio.old.daemon.refusals())
    for _ in range(30):
        trio.rounds(trio.laptop, trio.old, count=1)
    assert trio.attempts.spawned.total() == 1
    assert len(trio.old.daemon.runner.commands()) == 3  # type: ignore[attr-defined]
    assert not trio.old.daemon.refusals()
