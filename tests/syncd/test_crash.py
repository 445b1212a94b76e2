"""Crashes at every durable step, the invariants that must hold after them, and what shows that
these can fail. The long form is `make soak`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SOAK, CRASH = TESTS / "soak", TESTS / "support" / "crash"
sys.path[:0] = [str(SOAK), str(CRASH)]

from evidence import Appended, EndSeen, Evidence, Statement  # noqa: E402
from invariants import Harm, judge  # noqa: E402
from looks import Looks, check_hash, check_journal, check_status  # noqa: E402
from plan import COMMANDS, Shot, random_plan  # noqa: E402

from protocol.journal import JournalRecord  # noqa: E402
from protocol.logs import LogEnd, LogStart  # noqa: E402
from protocol.paths import Layout  # noqa: E402
from protocol.results import RunRecord, StageReport  # noqa: E402
from protocol.states import Result, State  # noqa: E402

# What must have been among the points, by its role and how it is called.
STEPS = {
    "controller": (
        *("write@syncd.records.JournalFile.add", "commit@syncd.controller.Controller."),
        *("upload-pack@", "acknowledge@", "rename@protocol.results.Results.save"),
        *("write@syncd.delivery.joins.Joins", "commit@syncd.delivery.link.Link._apply"),
    ),
    "worker": (
        *("write@syncd.records.JournalFile.add", "upload-pack@", "acknowledge@"),
        *("rename@syncd.stages.attempt.prepare", "spawn@syncd.stages.attempt"),
        *("rename@protocol.results.Results.save", "commit@syncd.delivery.link.Link._apply"),
        *("rename@syncd.delivery.holds.Holds.keep", "commit@syncd.delivery.checkpoints."),
        *("commit@syncd.delivery.proofs.Proofs.note", "rename@syncd.worker.Worker._prove"),
    ),
    "supervisor": (
        *("rename@syncd.stages.supervisor.main", "fork@", "rename@syncd.stages.supervisor._Tree"),
        *("write@syncd.stages.supervisor._Tree.start", "rename@syncd.stages.exits.record_end"),
    ),
}
# A fault of `faults`, and what it does to a person.
FAULTS = {
    "scan_is_kept_too_late": Harm.DOUBLED,
    "pack_is_read_before_it_is_applied": Harm.LOST,
    "cursor_of_a_log_is_not_kept": Harm.LOST,
    "files_are_written_in_place": Harm.TORN,
}
LONG = {"cursor_of_a_log_is_not_kept"}
RUN, SHELL = "quick.0001.7f3a", "sh.0002.7f3a"


def quick(*arguments: str) -> dict[str, Any]:
    """Run a short crash test in a process of its own, which is what it needs to be."""
    command = [sys.executable, str(SOAK / "quick.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def test_a_crash_at_any_step_of_any_process_loses_doubles_and_tears_nothing() -> None:
    outcome = quick()
    assert outcome["violations"] == []
    for role, steps in STEPS.items():
        killed = [point for point in outcome["kills"] if point.startswith(role)]
        for step in steps:
            assert any(step in point for point in killed), f"{role} {step}"
        assert any(f"{role}:after:fsync@" in point for point in outcome["points"])


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.long if fault in LONG else ()) for fault in FAULTS],
)
def test_a_fault_of_syncd_is_seen_by_the_harness(fault: str) -> None:
    harm = {told[0] for told in quick(fault)["violations"]}
    assert FAULTS[fault] in harm


# The invariants, on evidence made by hand


def record(number: int, state: State, **more: Any) -> JournalRecord:
    run_id = RUN if number == 1 else SHELL
    line = "run:quick" if number == 1 else "sh:bHMK"
    if state is State.ENDED:
        more = {"result": Result.SUCCESS, **more}
    if state is not State.CLAIMED:
        more = {"attempt": 1, **more}
    return JournalRecord(
        **{"number": number, "line": line, "state": state, "time": 1.0, "run_id": run_id, **more},
        **({} if "worker" in more else {"worker": "w-000001-51b0c7de"}),
    )


def run(run_id: str, line: str, **more: Any) -> RunRecord:
    stage = run_id.partition(".")[0]
    made = {"run_id": run_id, "stage": stage, "line": line, "result": Result.SUCCESS, **more}
    return RunRecord(**made)


def good() -> Evidence:
    """The evidence of one run: and one sh: that went well."""
    steps = [record(n, s) for n in (1, 2) for s in (State.CLAIMED, State.STARTED, State.ENDED)]
    report = StageReport(run_id=RUN, stage="quick", metrics={"attempt": 1.0})
    seen = EndSeen(
        journal=steps,
        results={RUN: run(RUN, "run:quick", report=report), SHELL: run(SHELL, "sh:bHMK")},
        logs={"quick.log": log_of(RUN, [1, 2, 3]), "sh-2.log": log_of(SHELL, [1])},
        artifacts=frozenset({f"{RUN}/small-1-00.bin", f"{RUN}/big-1-00.bin"}),
    )
    return Evidence(
        appended=(Appended("run:quick", 4), Appended("sh:bHMK", 4)),
        testimony=(
            *(told("start", RUN, "4", "4"), told("resume", RUN, "0")),
            *(told("checkpoint", RUN, "3"), told("end", RUN, "0")),
            *(told("start", SHELL), told("end", SHELL, "0")),
        ),
        laptop=seen,
        vm=seen,
        retries={"quick": 3, "next": 3, "bad": 1},
    )


def log_of(run_id: str, steps: list[int]) -> bytes:
    lines = [f"line {run_id} 1 {step}\n".encode() for step in steps]
    start = LogStart(run_id=run_id, attempt=1, time=1.0, command="x")
    end = LogEnd(run_id=run_id, attempt=1, time=2.0, seconds=1.0, result=Result.SUCCESS)
    return b"".join([start.line(), *lines, end.line()])


def told(event: str, run_id: str, *details: str, machine: str = "vm1") -> Statement:
    return Statement(event, machine, run_id, 1, details)


def journal(evidence: Evidence, *records: JournalRecord) -> Evidence:
    """The evidence with both journals changed to these records."""
    here, there = evidence.laptop, evidence.vm
    return replace(
        evidence, laptop=replace(here, journal=records), vm=replace(there, journal=records)
    )


def laptop(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, laptop=replace(evidence.laptop, **changes))


def ended_as(result: Result, **more: Any) -> Callable[[Evidence], Evidence]:
    """Let the run: end otherwise, at both ends and in the results."""

    def change(evidence: Evidence) -> Evidence:
        steps = [*evidence.laptop.journal[:2], record(1, State.ENDED, result=result, **more)]
        changed = journal(evidence, *steps, *evidence.laptop.journal[3:])
        results = {**evidence.laptop.results, RUN: run(RUN, "run:quick", result=result)}
        seen = replace(changed.laptop, results=results)
        return replace(changed, laptop=seen, vm=seen)

    return change


def more_told(*testimony: Statement) -> Callable[[Evidence], Evidence]:
    return lambda e: replace(e, testimony=(*e.testimony, *testimony))


HARM: dict[str, tuple[Harm, Callable[[Evidence], Evidence]]] = {
    "a line was never numbered": (
        Harm.LOST,
        lambda e: replace(e, appended=(*e.appended, Appended("run:slow", 4))),
    ),
    "a line was numbered twice": (Harm.DOUBLED, lambda e: replace(e, appended=e.appended[:1])),
    "a command never ended": (Harm.LOST, lambda e: journal(e, *e.laptop.journal[:5])),
    "a command ended twice": (
        Harm.DOUBLED,
        lambda e: journal(e, *e.laptop.journal, e.laptop.journal[-1]),
    ),
    "a command ended twice, as two records": (
        Harm.DOUBLED,
        lambda e: journal(e, *e.laptop.journal, record(2, State.ENDED, attempt=2)),
    ),
    "a run ended as killed that nothing hit": (Harm.LOST, ended_as(Result.KILLED)),
    "a run was stopped that no line stops": (Harm.LOST, ended_as(Result.STOPPED)),
    "a run was skipped that comes after nothing": (Harm.LOST, ended_as(Result.SKIPPED)),
    "a run had an attempt for no reason": (Harm.DOUBLED, ended_as(Result.SUCCESS, attempt=2)),
    "a run was alive twice": (Harm.DOUBLED, more_told(told("doubled", RUN, RUN))),
    "an sh: was run twice": (Harm.DOUBLED, more_told(told("start", SHELL))),
    "an sh: succeeded without being run": (
        Harm.LOST,
        lambda e: replace(e, testimony=e.testimony[:4]),
    ),
    "a run began behind its checkpoint": (Harm.LOST, more_told(told("resume", RUN, "2"))),
    "a run began behind what had arrived": (
        Harm.LOST,
        lambda e: more_told(told("resume", RUN, "1", machine="vm2"))(
            replace(e, arrived={("vm2", RUN): 3}, machines=2)
        ),
    ),
    "a run used an older payload": (Harm.LOST, more_told(told("start", RUN, "3", "4"))),
    "a record did not arrive": (Harm.LOST, lambda e: laptop(e, journal=e.laptop.journal[1:])),
    "a result did not arrive": (Harm.LOST, lambda e: laptop(e, results={})),
    "a report was lost": (
        Harm.LOST,
        lambda e: laptop(e, results={**e.laptop.results, RUN: run(RUN, "run:quick")}),
    ),
    "an artefact did not arrive": (Harm.LOST, lambda e: laptop(e, artifacts=frozenset())),
    "a log differs": (
        Harm.LOST,
        lambda e: laptop(e, logs={**e.laptop.logs, "quick.log": log_of(RUN, [1, 2])}),
    ),
    "a log has a line twice": (
        Harm.DOUBLED,
        lambda e: laptop(e, logs={**e.laptop.logs, "quick.log": log_of(RUN, [1, 2, 2, 3])}),
    ),
    "a log lacks a line": (
        Harm.LOST,
        lambda e: laptop(
            replace(e, machines=2), logs={**e.laptop.logs, "quick.log": log_of(RUN, [1, 3])}
        ),
    ),
    "a log lacks a run's end": (
        Harm.LOST,
        lambda e: laptop(
            replace(e, machines=2),
            logs={**e.laptop.logs, "quick.log": log_of(RUN, [1, 2, 3])[:-60]},
        ),
    ),
    "a file was seen torn": (Harm.TORN, lambda e: replace(e, bad_looks=("results.json",))),
    "a process is left": (Harm.DOUBLED, lambda e: replace(e, alive=("7",))),
    "a temporary file is left": (Harm.OTHER, lambda e: replace(e, leftovers=(".a.tmp",))),
    "the remote fills up": (Harm.OTHER, lambda e: replace(e, objects=1000)),
    "a daemon speaks of a fault": (Harm.OTHER, lambda e: replace(e, said=("a fault in push",))),
}


def test_evidence_of_what_went_well_is_judged_so() -> None:
    assert judge(good()) == []


@pytest.mark.parametrize("what", HARM)
def test_each_invariant_can_fail(what: str) -> None:
    harm, change = HARM[what]
    assert harm in {found for found, _ in judge(change(good()))}


def test_a_run_may_end_as_killed_when_more_kills_hit_it_than_it_has_retries() -> None:
    killed = ended_as(Result.KILLED, attempt=4)(good())
    assert not [text for _, text in judge(replace(killed, hits={RUN: 4})) if "ended as" in text]
    assert [text for _, text in judge(replace(killed, hits={RUN: 3})) if "ended as" in text]


# Looks


def test_a_look_sees_what_is_not_whole(tmp_path: Path) -> None:
    journal_file, status, named = (
        tmp_path / n for n in ("journal.jsonl", "status.txt", "a-00.bin")
    )
    line = record(1, State.CLAIMED).encode()
    journal_file.write_bytes(line + line[:20])
    assert not check_journal(journal_file)
    journal_file.write_bytes(line[:20] + b"\n" + line)
    assert "line 1" in check_journal(journal_file)
    status.write_text("worker w on vm\n\nrunning\n  nothing\n")
    assert "not whole" in check_status(status)
    named.write_bytes(b"x")
    assert check_hash(named)


def test_a_file_is_looked_at_again_only_when_it_has_changed(tmp_path: Path) -> None:
    layout, looks = Layout(tmp_path), Looks()
    layout.inbox.mkdir()
    for text in ("{", "{", "{}"):
        if not layout.results.exists() or layout.results.read_text() != text:
            layout.results.write_text(text)
        looks.look(layout)
    assert looks.count == 2
    assert len(looks.bad) == 2


# Plans


def test_an_episode_follows_from_its_seed() -> None:
    points = [f"{role}:after:fsync@f{n}" for role in STEPS for n in range(9)]
    assert random_plan("a", points, 30) == random_plan("a", points, 30)
    assert random_plan("a", points, 30) != random_plan("b", points, 30)


def test_an_episode_has_every_kind_of_command_and_shots_of_every_role() -> None:
    points = [f"{role}:after:fsync@f{n}" for role in STEPS for n in range(9)]
    plan = random_plan("a", points, 40)
    assert set(plan.commands) == set(COMMANDS)
    shots = [
        step.point.partition(":")[0]
        for lane in plan.lanes
        for step in lane
        if isinstance(step, Shot)
    ]
    assert set(shots) == set(STEPS)


# The layer


SAVE = """
import sys, crashpoints
from pathlib import Path
from protocol.paths import Layout
from syncd.config import Key
crashpoints.install("worker", sys.argv[1])
for _ in range(5):
    Key.new().save(Layout(Path(sys.argv[2])))
    print("saved", flush=True)
"""


def save_keys(tmp_path: Path, *shots: str) -> subprocess.CompletedProcess[str]:
    """Save a key five times in a process with crash points, of which these are asked for."""
    control = tmp_path / "control"
    (control / "shots").mkdir(parents=True, exist_ok=True)
    for shot in shots:
        (control / "shots" / shot).touch()
    environ = {**os.environ, "PYTHONPATH": str(CRASH)}
    command = [sys.executable, "-c", SAVE, str(control), str(tmp_path / "root")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_a_point_is_called_by_its_step_and_the_function_that_took_it(tmp_path: Path) -> None:
    assert save_keys(tmp_path).returncode == 0
    points = (tmp_path / "control" / "points").read_text().split()
    for step in ("create", "fsync", "rename", "fsync-folder"):
        for phase in ("before", "after"):
            assert f"worker:{phase}:{step}@syncd.config.Key.save" in points


def test_a_shot_ends_the_process_at_the_nth_meeting_and_never_again(tmp_path: Path) -> None:
    shot = "1=worker:before:rename@syncd.config.Key.save=3"
    died = save_keys(tmp_path, shot)
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "saved\nsaved\n")
    assert save_keys(tmp_path).stdout == "saved\n" * 5
    assert (tmp_path / "control" / "kills").read_text().startswith(shot)


def test_a_shot_at_each_point_in_turn_finds_a_new_one_each_time(tmp_path: Path) -> None:
    for number in range(20):
        if save_keys(tmp_path, f"{number}=worker:*=0").returncode == 0:
            break
    kills = (tmp_path / "control" / "kills").read_text().splitlines()
    assert len(kills) == len({line.split()[1] for line in kills}) == number
    assert any("after:rename@" in line for line in kills)


# The sum


def test_the_counts_of_shards_add_up_and_any_harm_makes_the_exit_code_1(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        "kills": {"a": 2},
        "harm": {},
        "points": ["a", "b"],
        "episodes": 1,
        "looks": 5,
        "seeds": ["s 1/2"],
    }
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    first.write_text(json.dumps(value))
    for harm, line, code in (
        ({}, "kills 4 lost 0 doubled 0 torn 0", 0),
        ({"lost": 1}, "kills 4 lost 1 doubled 0 torn 0", 1),
    ):
        second.write_text(json.dumps({**value, "harm": harm}))
        command = [sys.executable, str(SOAK / "soak.py"), "--add", str(first), str(second)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.stdout.splitlines()[-1], done.returncode) == (line, code)
