"""The runner with real supervisors and stages: stopping in every state, retries, who may run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chunks import Chunks
from waiting import eventually

from protocol.journal import JournalRecord
from protocol.messages import Content, FileEntry, QueuedCommand
from protocol.paths import Layout
from protocol.publish import temporary_beside
from protocol.snapshots import encode_snapshot
from protocol.states import Result, State
from syncd.delivery.contents import Contents
from syncd.delivery.payload import PayloadStore
from syncd.platform import Identity
from syncd.records import JournalFile, ResultsFile
from syncd.stages import attempt, schedule
from syncd.stages.attempt_files import read_file
from syncd.stages.causes import ExitRecord
from syncd.stages.orphans import remains
from syncd.stages.runner import Runner
from syncd.state import State as Database

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the worker runs on Linux")

WORKER = "w-000001-7f3a9c02"
UNTIL_GO = "echo $$ >> $SYNCD_STORE/pids; while ! test -e $SYNCD_STORE/go; do sleep 0.02; done"
STAGES = f"""
[stages.wait]
command = "{UNTIL_GO}"
gpu = 0.6
grace = 1

[stages.stubborn]
command = "trap '' TERM; {UNTIL_GO}"
gpu = 0
grace = 600

[stages.after]
command = "touch $SYNCD_STORE/ran"
after = ["wait"]

[stages.big]
command = "touch $SYNCD_STORE/ran"
gpu = 0.6

[stages.fail]
command = "echo trying; exit 7"
retries = 2
gpu = 0

[stages.hopeless]
command = ["/no/such/program"]
retries = 1
gpu = 0
"""


class Machine:
    """A worker's folder with commands and payload, and a runner, which a test may start again."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        for folder in ("payload", "content"):
            (self.layout.private / folder).mkdir(parents=True)
        self.layout.store.mkdir()
        self.layout.inbox.mkdir()
        self.state = Database(self.layout.private / "state.db")
        chunks = Chunks()
        content = self.layout.private / "content"
        self.payloads = PayloadStore(
            self.state,
            root,
            self.layout.private / "payload",
            Contents(self.state, content, lambda: chunks),
        )
        self.restart()

    def restart(self) -> None:
        """Take up the work as a daemon does that was killed and started again."""
        self.journal = JournalFile(self.state, self.layout.journal)
        self.results = ResultsFile(self.state, self.layout.results)
        self.runner = Runner(
            layout=self.layout,
            database=self.state,
            journal=self.journal,
            results=self.results,
            payloads=self.payloads,
            policy=schedule.Policy(),
            worker=WORKER,
            is_published=lambda record: True,
            doubtful=0,
            why_gone=lambda worker, run_id: f"VM gone: {worker}",
        )

    def serve(self, text: str = STAGES, order: int = 1) -> None:
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        entry = FileEntry(path="stages.toml", size=len(data), mode=0o644, sha256=digest)
        with self.state.transaction():
            self.payloads.apply(Content(sha256=digest, size=len(data), blob=data), ())
            self.payloads.apply(encode_snapshot(order, [entry]), ())
        self.payloads.unpack(())

    def append(self, *lines: str) -> None:
        for line in lines:
            row = self.state.row("SELECT COALESCE(MAX(number), 0) + 1 FROM commands")
            assert row is not None
            number, stage = int(row[0]), line.partition(":")[2]
            run_id = "" if line.startswith("stop:") else f"{stage}.{number:04d}.7f3a"
            command = QueuedCommand(number=number, line=line, run_id=run_id, snapshot=1)
            self.state.run(
                "INSERT INTO commands VALUES (?, ?)", number, json.dumps(asdict(command))
            )

    def record(self, number: int) -> JournalRecord | None:
        return self.journal.newest.get(number)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Do rounds until something is so; return it."""

        def look() -> Any:
            self.runner.round()
            return condition()

        return eventually(look, within=30, what=lambda: f"{self.runner.plan}\n{self.told()}")

    def told(self) -> str:
        return self.layout.journal.read_text()

    def ended(self, number: int) -> JournalRecord:
        def find() -> JournalRecord | None:
            record = self.record(number)
            return record if record and record.state is State.ENDED else None

        found: JournalRecord = self.until(find)
        return found

    def folder(self, number: int, attempts: int = 1) -> Path:
        record = self.record(number)
        assert record is not None
        return attempt.attempt_dir(self.runner.run_dir(record.run_id), attempts)

    def supervisor(self, number: int) -> Identity:
        found = read_file(self.folder(number) / "supervisor.json", Identity)
        assert found is not None
        return found

    def runs(self) -> bool:
        """Whether a stage has said its process id."""
        return (self.layout.store / "pids").exists()

    def pids(self) -> int:
        """How many stages have said their process id."""
        path = self.layout.store / "pids"
        return len(path.read_text().split()) if path.exists() else 0

    def left(self) -> list[Identity]:
        return [p for folder in self.layout.runs.glob("*/attempt-*") for p in remains(folder)]

    def close(self) -> None:
        def all_killed() -> bool:
            files = self.layout.runs.glob("*/attempt-*/supervisor.json")
            supervisors = [read_file(file, Identity) for file in files]
            left = [p for p in supervisors if p is not None and p.alive()] + self.left()
            for process in left:
                process.signal(signal.SIGKILL)
            return not left

        eventually(all_killed, what="processes live on")
        self.state.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "vm")
    machine.serve()
    yield machine
    machine.close()


# stop: in every state


def queued(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.append("run:wait")
    return 1


def waiting_for_after(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.append("run:wait", "run:after")
    machine.until(lambda: machine.runner.plan.waits.get(2) == "after wait.0001.7f3a")
    return 2


def waiting_for_its_share(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.append("run:wait", "run:big")
    machine.until(lambda: "its share" in machine.runner.plan.waits.get(2, ""))
    return 2


def killed_in(machine: Machine, monkeypatch: pytest.MonkeyPatch, owner: object, step: str) -> None:
    """Have a daemon that is starting a run killed in a step of it."""
    machine.append("run:wait")
    monkeypatch.setattr(owner, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.runner.round()
    monkeypatch.undo()


def claimed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Killed between the claim and the start."""
    killed_in(machine, monkeypatch, Runner, "_prepare")
    assert machine.record(1).state is State.CLAIMED
    machine.restart()
    return 1


def started_and_not_spawned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    killed_in(machine, monkeypatch, attempt, "_spawn_detached")
    assert machine.record(1).state is State.STARTED
    machine.restart()
    return 1


def spawned_and_not_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Killed right after it spawned the supervisor, which is starting."""
    killed_in(machine, monkeypatch, attempt, "_exit_code")
    machine.restart()
    return 1


def running(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.append("run:wait")
    machine.until(machine.runs)
    return 1


def between_retries(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 1000.0)
    machine.append("run:fail")
    machine.until(lambda: "another attempt in" in machine.runner.plan.waits.get(1, ""))
    return 1


def orphaned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    running(machine, monkeypatch)
    supervisor = machine.supervisor(1)
    assert supervisor.signal(signal.SIGKILL)
    eventually(lambda: not supervisor.alive())
    assert isinstance(attempt.observe(machine.folder(1)), attempt.Orphaned)
    return 1


def interrupt(*anything: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "state",
    [
        queued,
        waiting_for_after,
        waiting_for_its_share,
        claimed,
        started_and_not_spawned,
        spawned_and_not_reported,
        running,
        between_retries,
        orphaned,
    ],
)
def test_stop_ends_a_run_in_every_state(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[Machine, pytest.MonkeyPatch], int],
) -> None:
    number = state(machine, monkeypatch)
    record = machine.record(number)
    before = record.attempt if record else 0
    message, _ = machine.runner.commands()[number]
    stage = message.line.removeprefix("run:")
    stop = max(machine.runner.commands()) + 1
    machine.append(f"stop:{stage}", f"run:{stage}")
    assert machine.ended(stop).result is Result.SUCCESS
    ended = machine.ended(number)
    assert ended.result is Result.STOPPED
    assert ended.attempt == before
    folders = machine.layout.runs.glob(f"{ended.run_id}/attempt-*")
    assert [p for folder in folders for p in remains(folder)] == []
    # What stands after it is not stopped.
    assert machine.record(stop + 1) is None or machine.record(stop + 1).result is None


# Retries


def test_a_stage_that_keeps_dying_is_given_up_with_every_attempts_end_on_record(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    machine.append("run:fail")
    ended = machine.ended(1)
    end = "exit 7; last line: trying"
    assert (ended.result, ended.attempt, ended.exit_code) == (Result.FAILED, 3, 7)
    assert ended.cause == f"gave up after 3 attempts; the last: {end}"
    records = [json.loads(line) for line in machine.told().splitlines()]
    starts = [(r["attempt"], r.get("cause")) for r in records if r["state"] == "started"]
    assert starts == [(1, None), (2, f"attempt 1: {end}"), (3, f"attempt 2: {end}")]
    result = machine.results.get(ended.run_id)
    assert result is not None
    assert (result.cause, result.attempts) == (ended.cause, 3)


def test_why_an_attempt_ended_is_on_record_also_when_the_daemon_was_killed_meanwhile(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    between_retries(machine, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    machine.restart()
    machine.until(lambda: machine.record(1).attempt == 2)
    assert '"cause": "attempt 1: exit 7; last line: trying"' in machine.told()


def test_an_attempt_that_its_machine_ended_costs_no_retry(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    machine.append("run:wait")
    for attempts in (1, 2):
        machine.until(lambda n=attempts: machine.pids() == n)
        machine.until(lambda n=attempts: machine.record(1).attempt == n)
        file = machine.folder(1, attempts) / "supervisor.json"
        supervisor = read_file(file, Identity)
        assert supervisor is not None
        supervisor.signal(signal.SIGTERM)  # as a machine does that shuts down
    machine.until(lambda: machine.pids() == 3)
    (machine.layout.store / "go").touch()
    ended = machine.ended(1)
    assert (ended.result, ended.attempt) == (Result.SUCCESS, 3)
    assert '"cause": "attempt 2: its supervisor was sent SIGTERM"' in machine.told()


def test_a_clock_that_is_set_back_keeps_no_retry_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7200)
    machine.append("run:fail")
    assert machine.ended(1).attempt == 3


def test_a_damaged_record_of_an_earlier_attempt_counts_as_a_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    between_retries(machine, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    machine.restart()
    machine.until(lambda: machine.record(1).attempt == 2)
    (machine.folder(1) / "exit.json").write_bytes(b"\0" * 100)
    machine.append("run:big")
    assert machine.ended(2).result is Result.SUCCESS
    assert machine.ended(1).attempt == 3


def test_an_end_on_record_counts_though_its_supervisors_file_is_damaged(machine: Machine) -> None:
    machine.append("run:wait")
    machine.until(machine.runs)
    damaged = machine.folder(1) / "supervisor.json"
    damaged.write_bytes(b"\0" * 100)
    (machine.layout.store / "go").touch()
    assert machine.ended(1).result is Result.SUCCESS
    damaged.unlink()


@pytest.mark.parametrize("file", ["RESULT_FILE", "PROGRESS_FILE"])
def test_a_pipe_where_a_file_should_be_keeps_nobody_waiting(machine: Machine, file: str) -> None:
    machine.serve(f'[stages.pipe]\ncommand = "mkfifo $SYNCD_{file}"\n', order=2)
    machine.append("run:pipe")
    ended = machine.ended(1)
    assert ended.result is Result.SUCCESS
    assert ("its report is unusable" in machine.results.get(ended.run_id).cause) == (
        file == "RESULT_FILE"
    )


def test_a_program_that_is_not_there_is_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "backoff", lambda attempts: 0.0)
    machine.append("run:hopeless")
    ended = machine.ended(1)
    why = "cannot run /no/such/program: No such file or directory"
    assert ended.result is Result.FAILED_TO_SPAWN
    assert ended.cause == f"gave up after 2 attempts; the last: {why}"


def test_one_attempt_alone_is_no_giving_up(machine: Machine) -> None:
    machine.serve()
    machine.append("run:wait")
    machine.until(machine.runs)
    (pid,) = (machine.layout.store / "pids").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    assert machine.ended(1).cause == "SIGKILL"


# Orphans and fences


def test_an_orphan_that_will_not_end_keeps_nothing_else_waiting(machine: Machine) -> None:
    machine.append("run:stubborn")
    machine.until(machine.runs)
    supervisor = machine.supervisor(1)
    assert supervisor.signal(signal.SIGKILL)
    eventually(lambda: not supervisor.alive())
    machine.append("run:fail")
    machine.until(lambda: machine.record(2) and machine.record(2).attempt == 2)
    assert machine.left(), "the stubborn one was to live on"
    (machine.layout.store / "go").touch()
    assert machine.ended(1).cause.startswith("its supervisor died")


def test_a_fence_ends_what_runs_and_starts_nothing(machine: Machine) -> None:
    machine.append("run:wait", "run:fail")
    machine.until(machine.runs)
    machine.layout.fence.write_text('{"by": "w-000002-51b0c7de", "time": 1.0}')
    exit_file = machine.folder(1) / "exit.json"
    machine.until(exit_file.exists)
    ended = read_file(exit_file, ExitRecord)
    assert ended is not None
    assert ended.result is Result.STOPPED
    assert ended.cause == "fenced: w-000002-51b0c7de has taken over"
    eventually(machine.runner.give_way)
    assert not machine.left()
    # The run goes on elsewhere: nobody must hear that it has ended.
    record = machine.record(1)
    assert record is not None
    assert record.state is State.STARTED


def test_giving_way_runs_no_attempt_that_had_not_begun(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_and_not_spawned(machine, monkeypatch)
    folder = machine.folder(1)
    dead = Identity(4_000_000, "1", Identity.of(os.getpid()).boot)
    for seen in (attempt.NeverStarted(), attempt.Vanished(started=False)):
        assert attempt.observe(folder) == seen
        half_written = temporary_beside(folder / "supervisor.json")
        half_written.touch()  # of a supervisor that was killed there
        assert machine.runner.give_way()
        assert not half_written.exists()
        (folder / "supervisor.json").write_text(json.dumps(vars(dead)))
    assert not machine.runs()


def test_nothing_is_left_of_an_attempt_that_was_never_begun(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = between_retries(machine, monkeypatch)
    half_written = temporary_beside(machine.folder(number, 2) / "spec.json")
    half_written.parent.mkdir()
    half_written.touch()  # of a daemon that was killed there
    machine.append("stop:fail")
    assert machine.ended(number).attempt == 1
    assert not half_written.exists()


def test_a_damaged_attempt_is_a_problem_of_its_own_alone(machine: Machine) -> None:
    machine.append("run:wait")
    machine.until(machine.runs)
    record = (machine.folder(1) / "supervisor.json").read_text()
    (machine.folder(1) / "supervisor.json").write_text("{")
    machine.append("run:fail")
    machine.until(lambda: machine.record(2))
    assert "supervisor.json" in machine.runner.problems["wait.0001.7f3a"]
    (machine.folder(1) / "supervisor.json").write_text(record)
    (machine.layout.store / "go").touch()
    assert machine.ended(1).result is Result.SUCCESS
    assert "wait.0001.7f3a" not in machine.runner.problems
