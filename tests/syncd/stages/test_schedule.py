"""What comes next with the queue: DESIGN.md's "Order" and "What a command is promised"."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.queue import RunCommand, parse_command
from protocol.stages import Stage
from protocol.states import Result, State
from syncd.stages.schedule import (
    MAX_BACKOFF_SECONDS,
    Claim,
    End,
    Entry,
    Payload,
    Plan,
    Policy,
    Start,
    Stop,
    backoff,
    plan,
)

SHELL = "sh:bHM="
QUEUED, CLAIMED, STARTED, ENDED = State


def stages(**gpu):
    """Stages pretrain -> finetune -> gate, and any more, with their shares."""
    after = {"finetune": ("pretrain",), "gate": ("finetune",)}
    names = {"pretrain": 0.5, "finetune": 0.5, "gate": 0.5} | gpu
    return {
        name: Stage(name=name, command="true", gpu=share, after=after.get(name, ()))
        for name, share in names.items()
    }


def entry(number, line, state=QUEUED, **more):
    result = more.pop("result", None)
    if isinstance(state, Result):
        state, result = ENDED, state
    command = None if more.get("error") and "command" not in more else parse_command(line)
    stage = line.partition(":")[2] if line.startswith("run:") else "sh"
    run_id = "" if line.startswith("stop:") else f"{stage}.{number:04d}.0000"
    defaults = {"run_id": run_id, "command": command, "snapshot": 1}
    return Entry(number=number, line=line, state=state, result=result, **defaults | more)


def decide(*entries, shares=None, payloads=None, policy=None, now=100.0):
    return plan(
        list(entries),
        payloads={1: Payload(1, stages())} if payloads is None else payloads,
        shares=shares or {},
        policy=policy or Policy(),
        now=now,
    )


def running(number, line, **more):
    return entry(number, line, STARTED, alive=True, attempts=1, **more)


# Order


def test_commands_are_considered_in_file_order_whatever_the_order_of_the_list():
    found = decide(entry(2, "run:pretrain"), entry(1, "run:pretrain"))
    assert found.actions == (Start(1, 1),)
    assert found.waits == {2: "another run of pretrain"}


def test_a_later_command_overtakes_one_that_waits():
    found = decide(
        running(1, "run:pretrain"), entry(2, "run:finetune"), entry(3, "run:other"),
        payloads={1: Payload(1, stages(other=0.5))}, shares={1: 0.5},
    )  # fmt: skip
    assert found.actions == (Start(3, 1),)
    assert found.waits == {2: "after pretrain.0001.0000"}


@pytest.mark.parametrize(
    ("before", "action", "wait"),
    [
        ([(1, Result.SUCCESS)], Start(9, 1, {"pretrain": "pretrain.0001.0000"}), ""),
        ([(1, Result.FAILED), (2, Result.SUCCESS)],
         Start(9, 1, {"pretrain": "pretrain.0002.0000"}), ""),
        # The newest before it counts, not the best.
        ([(1, Result.SUCCESS), (2, Result.FAILED)],
         End(9, Result.SKIPPED, "pretrain.0002.0000 ended as failed"), ""),
        # One that stands after it does not count.
        ([(1, Result.SUCCESS), (10, Result.FAILED)],
         Start(9, 1, {"pretrain": "pretrain.0001.0000"}), ""),
        ([(10, Result.SUCCESS)],
         End(9, Result.SKIPPED, "no run:pretrain stands before it in the queue"), ""),
        ([], End(9, Result.SKIPPED, "no run:pretrain stands before it in the queue"), ""),
        ([(1, STARTED)], None, "after pretrain.0001.0000"),
        ([(1, Result.SUCCESS), (2, STARTED)], None, "after pretrain.0002.0000"),
        *[
            ([(1, result)], End(9, Result.SKIPPED, f"pretrain.0001.0000 ended as {result}"), "")
            for result in Result
            if result is not Result.SUCCESS
        ],
    ],
)  # fmt: skip
def test_a_run_comes_after_the_newest_command_of_that_stage_before_it(before, action, wait):
    entries = [entry(n, "run:pretrain", state, alive=state is STARTED) for n, state in before]
    found = decide(*entries, entry(9, "run:finetune"))
    assert [a for a in found.actions if a.number == 9] == ([action] if action else [])
    assert found.waits.get(9, "") == wait


def test_a_failure_skips_the_whole_chain_in_one_plan():
    found = decide(
        entry(1, "run:pretrain", Result.FAILED), entry(2, "run:finetune"), entry(3, "run:gate")
    )
    assert [(a.number, a.result) for a in found.actions] == [
        (2, Result.SKIPPED),
        (3, Result.SKIPPED),
    ]
    assert found.actions[1].cause == "finetune.0002.0000 ended as skipped"


def test_a_refused_command_counts_as_the_newest_of_its_stage():
    refused = entry(2, "run:pretrain", error="why", command=RunCommand("pretrain"))
    found = decide(entry(1, "run:pretrain", Result.SUCCESS), refused, entry(3, "run:finetune"))
    assert found.actions == (
        End(2, Result.REFUSED, "why"),
        End(3, Result.SKIPPED, "pretrain.0002.0000 ended as refused"),
    )


# What is refused


@pytest.mark.parametrize(
    ("command", "policy", "cause"),
    [
        (entry(1, "run:pretrain", error="line 3: broken"), Policy(), "line 3: broken"),
        (entry(1, "run:pretrian"), Policy(),
         "stages.toml defines no stage 'pretrian'. Did you mean 'pretrain'?"),
        (entry(1, "run:gate"), Policy(stages=frozenset({"pretrain"})),
         "this worker's policy does not allow the stage 'gate'"),
        (entry(1, SHELL), Policy(shell=False), "this worker's policy allows no sh: commands"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_reason(command, policy, cause):
    assert decide(command, policy=policy).actions == (End(1, Result.REFUSED, cause),)


def test_a_payload_that_cannot_be_read_refuses_its_runs():
    found = decide(entry(1, "run:pretrain"), payloads={1: Payload(1, error="a cycle")})
    assert found.actions == (End(1, Result.REFUSED, "a cycle"),)


# Payloads


def test_a_run_waits_for_the_payload_that_it_was_appended_with():
    payloads = {n: Payload(n, stages()) for n in (1, 2)}
    found = decide(entry(1, "run:pretrain", snapshot=3), payloads=payloads)
    assert (found.actions, found.waits) == ((), {1: "its payload to arrive"})
    payloads[4] = Payload(4, stages())
    assert decide(entry(1, "run:pretrain", snapshot=3), payloads=payloads).actions == (Start(1, 4),)


def test_a_run_that_has_begun_keeps_its_payload():
    payloads = {n: Payload(n, stages()) for n in (1, 2)}
    found = decide(entry(1, "run:pretrain", STARTED, attempts=1), payloads=payloads)
    assert found.actions == (Start(1, 1),)
    claimed = decide(entry(1, "run:pretrain", CLAIMED), payloads={2: payloads[2]})
    assert (claimed.actions, claimed.waits) == ((), {1: "its payload to arrive"})


# Shares


def test_ten_runs_of_a_tenth_fill_the_gpu_and_an_eleventh_waits():
    names = [f"s{n}" for n in range(11)]
    payload = Payload(1, {n: Stage(name=n, command="true", gpu=0.1) for n in names})
    found = decide(
        *[entry(n, f"run:{name}") for n, name in enumerate(names, start=1)], payloads={1: payload}
    )
    assert [a.number for a in found.actions] == list(range(1, 11))
    assert found.waits[11].startswith("its share of the GPU, 0.1, of which")


def test_the_shares_of_the_living_are_taken():
    found = decide(
        running(1, "run:a"), entry(2, "run:pretrain"), entry(3, "run:free"), shares={1: 0.6},
        payloads={1: Payload(1, stages(a=0.6, free=0.0))},
    )  # fmt: skip
    assert found.actions == (Start(3, 1),)
    assert found.waits == {2: "its share of the GPU, 0.5, of which 0.4 is free"}


def test_one_run_of_a_stage_is_alive_at_a_time():
    found = decide(running(1, "run:free"), entry(2, "run:free"),
                   payloads={1: Payload(1, stages(free=0.0))})  # fmt: skip
    assert (found.actions, found.waits) == ((), {2: "another run of free"})


# Retries


def test_a_retry_waits_for_its_time_and_keeps_its_place():
    waiting = entry(1, "run:pretrain", STARTED, attempts=1, not_before=101.5)
    found = decide(waiting, entry(2, "run:pretrain"), now=100.0)
    assert found.actions == ()
    assert found.waits == {1: "another attempt in 2 s", 2: "another run of pretrain"}
    assert decide(waiting, entry(2, "run:pretrain"), now=101.5).actions == (Start(1, 1),)


def test_the_gpu_is_free_for_others_while_a_retry_waits():
    waiting = entry(1, "run:pretrain", STARTED, attempts=1, not_before=200.0)
    found = decide(waiting, entry(2, "run:big"), payloads={1: Payload(1, stages(big=1.0))})
    assert found.actions == (Start(2, 1),)


def test_a_run_that_another_worker_had_begun_is_started_again():
    begun = entry(1, "run:pretrain", STARTED, attempts=2, inherited=True)
    assert decide(begun).actions == (Start(1, 1),)


def test_waiting_doubles_up_to_five_minutes():
    assert [backoff(n) for n in range(1, 5)] == [1, 2, 4, 8]
    assert backoff(0) == 1
    assert backoff(10_000) == MAX_BACKOFF_SECONDS


# sh:


def test_a_shell_command_is_claimed_then_published_then_started():
    assert decide(entry(1, SHELL)).actions == (Claim(1),)
    unpublished = decide(entry(1, SHELL, CLAIMED, published=False))
    assert (unpublished.actions, unpublished.waits) == ((), {1: "its claim to reach the remote"})
    assert decide(entry(1, SHELL, CLAIMED)).actions == (Start(1, 1),)


def test_a_shell_command_needs_no_payload():
    assert decide(entry(1, SHELL, CLAIMED), payloads={}).actions == (Start(1, 0),)


@pytest.mark.parametrize(
    "first", [entry(1, SHELL), entry(1, SHELL, CLAIMED, published=False), running(1, SHELL)]
)
def test_shell_commands_run_one_at_a_time(first):
    found = decide(first, entry(2, SHELL))
    assert found.waits[2] == "an earlier sh: command"
    assert all(action.number == 1 for action in found.actions)


def test_a_shell_command_takes_no_share():
    found = decide(running(1, "run:big"), entry(2, SHELL, CLAIMED), shares={1: 1.0},
                   payloads={1: Payload(1, stages(big=1.0))})  # fmt: skip
    assert found.actions == (Start(2, 1),)


@pytest.mark.parametrize(
    ("begun", "cause"),
    [
        (entry(1, SHELL, CLAIMED, inherited=True), "the worker that had claimed it is gone"),
        (entry(1, SHELL, STARTED, inherited=True), "the worker that had claimed it is gone"),
        # At most once also on one machine, whatever became of its process.
        (entry(1, SHELL, STARTED, attempts=1), "its process is gone"),
    ],
)
def test_a_shell_command_that_may_have_run_is_lost_and_the_next_goes_on(begun, cause):
    found = decide(begun, entry(2, SHELL))
    assert found.actions == (End(1, Result.LOST, cause), Claim(2))


def test_a_shell_command_that_nobody_had_claimed_is_not_lost():
    assert decide(entry(1, SHELL, inherited=True)).actions == (Claim(1),)


# stop:


@pytest.mark.parametrize(
    "state",
    [
        entry(1, "run:pretrain"),
        entry(1, "run:pretrain", snapshot=7),
        entry(1, "run:pretrain", CLAIMED),
        entry(1, "run:pretrain", STARTED, attempts=1),
        entry(1, "run:pretrain", STARTED, attempts=1, not_before=200.0),
        entry(1, "run:pretrain", STARTED, attempts=1, inherited=True),
    ],
)
def test_a_run_that_is_not_alive_is_stopped_at_once_in_every_state(state):
    found = decide(state, entry(2, "stop:pretrain"))
    assert found.actions == (
        End(1, Result.STOPPED, "by command 2, stop:pretrain"),
        End(2, Result.SUCCESS, "stopped pretrain.0001.0000"),
    )
    assert found.waits == {}


def test_a_living_run_is_asked_once_and_the_stop_goes_on_until_it_has_ended():
    found = decide(running(1, "run:pretrain"), entry(2, "stop:pretrain"), shares={1: 0.5})
    assert found.actions == (Stop(1), Claim(2))
    assert found.waits == {2: "pretrain.0001.0000 to end"}
    asked = decide(running(1, "run:pretrain"), entry(2, "stop:pretrain", CLAIMED))
    assert (asked.actions, asked.waits) == ((), {2: "pretrain.0001.0000 to end"})
    over = decide(entry(1, "run:pretrain", Result.STOPPED), entry(2, "stop:pretrain", CLAIMED))
    assert over.actions == (End(2, Result.SUCCESS, "what was alive has ended"),)


def test_a_run_that_failed_by_itself_just_as_it_was_asked_is_not_tried_again():
    failed = entry(1, "run:pretrain", STARTED, attempts=1, not_before=50.0)
    found = decide(failed, entry(2, "stop:pretrain", CLAIMED))
    assert [a.number for a in found.actions if isinstance(a, Start)] == []
    assert End(1, Result.STOPPED, "by command 2, stop:pretrain") in found.actions


def test_a_stop_reaches_what_stands_before_it_and_nothing_after():
    found = decide(
        entry(1, "run:pretrain"), entry(2, "run:finetune"), entry(3, "stop:pretrain"),
        entry(4, "run:pretrain"),
    )  # fmt: skip
    assert found.actions == (
        End(1, Result.STOPPED, "by command 3, stop:pretrain"),
        End(2, Result.SKIPPED, "pretrain.0001.0000 ended as stopped"),
        End(3, Result.SUCCESS, "stopped pretrain.0001.0000"),
        Start(4, 1),
    )


def test_a_stop_with_nothing_before_it_says_so():
    over = entry(1, "run:pretrain", Result.SUCCESS)
    found = decide(over, entry(2, "stop:pretrain"), entry(3, "stop:gate"))
    assert found.actions == tuple(End(n, Result.SUCCESS, "nothing to stop") for n in (2, 3))


def test_a_stop_that_was_refused_stops_nothing():
    refused = entry(2, "stop:pretrain", error="why", command=parse_command("stop:pretrain"))
    found = decide(entry(1, "run:pretrain"), refused)
    assert found.actions == (Start(1, 1), End(2, Result.REFUSED, "why"))


# Cost


def test_twenty_thousand_ended_commands_cost_little():
    lines = ("run:pretrain", "run:finetune", SHELL, "stop:pretrain")
    entries = [entry(n, lines[n % 4], Result.SUCCESS) for n in range(1, 20_001)]
    entries.append(entry(20_001, "run:pretrain"))
    began = time.process_time()
    found = decide(*entries)
    assert time.process_time() - began < 0.5
    assert found.actions == (Start(20_001, 1),)


def test_a_thousand_stops_of_ten_thousand_runs_cost_little():
    entries = [entry(n, "run:pretrain") for n in range(1, 10_001)]
    entries += [entry(n, "stop:pretrain") for n in range(10_001, 11_001)]
    began = time.process_time()
    found = decide(*entries)
    assert time.process_time() - began < 1.0
    assert len(found.actions) == 11_000
    assert found.actions[10_000].cause.endswith("pretrain.0005.0000 and 9995 more")
    assert found.actions[10_001].cause == "nothing to stop"


# Properties

NAMES = ("pretrain", "finetune", "gate")


@st.composite
def queues(draw):
    lines = draw(
        st.lists(
            st.sampled_from([f"run:{n}" for n in NAMES] + [f"stop:{n}" for n in NAMES] + [SHELL]),
            max_size=12,
        )
    )
    shares = {name: draw(st.sampled_from([0.0, 0.1, 0.3, 0.4, 0.5, 0.7, 1.0])) for name in NAMES}
    return [entry(n, line) for n, line in enumerate(lines, start=1)], stages(**shares)


class World:
    """What a runner would make of plans: applies them, and lets runs end as `outcome` says."""

    def __init__(self, entries, defined):
        self.entries = {e.number: e for e in entries}
        self.stages = defined
        self.shares = {}
        self.now = 0.0

    def plan(self):
        given = {
            "payloads": {1: Payload(1, self.stages)},
            "shares": self.shares,
            "policy": Policy(),
            "now": self.now,
        }
        found = plan(list(self.entries.values()), **given)
        assert found == plan(list(reversed(self.entries.values())), **given)
        return found

    def change(self, number, **changes):
        self.entries[number] = dataclasses.replace(self.entries[number], **changes)

    def apply(self, found: Plan):
        for action in found.actions:
            one = self.entries[action.number]
            assert one.state is not ENDED
            if isinstance(action, End):
                assert not one.alive
                self.change(action.number, state=ENDED, result=action.result)
            elif isinstance(action, Claim):
                assert one.state is QUEUED
                self.change(action.number, state=CLAIMED, published=False)
            elif isinstance(action, Stop):
                assert one.alive
            else:
                self.start(one, action)
        assert sum(self.shares.values()) <= 1 + 1e-9

    def start(self, one, action):
        assert not one.alive
        alive = [e.stage for e in self.entries.values() if e.alive]
        assert one.stage not in alive
        if isinstance(one.command, RunCommand):
            self.shares[one.number] = self.stages[one.stage].gpu
            for name in self.stages[one.stage].after:
                before = [
                    e for e in self.entries.values()
                    if e.number < one.number and e.command == RunCommand(name)
                ]  # fmt: skip
                assert before[-1].result is Result.SUCCESS
                assert action.after[name] == before[-1].run_id
        else:
            assert one.attempts == 0
            assert one.published
        self.change(one.number, state=STARTED, alive=True, attempts=one.attempts + 1)

    def pass_time(self, chance):
        """Let something happen: a claim is published, a run ends, its retry's time comes."""
        for one in list(self.entries.values()):
            if not one.published:
                self.change(one.number, published=True)
            elif one.alive and chance.random() < 0.5:
                self.shares.pop(one.number, None)
                retried = one.attempts < 3 and isinstance(one.command, RunCommand)
                result = chance.choice([Result.SUCCESS, Result.FAILED])
                if result is Result.FAILED and retried and chance.random() < 0.5:
                    self.change(one.number, alive=False, not_before=self.now + 5)
                else:
                    self.change(one.number, alive=False, state=ENDED, result=result)
        self.now += 3


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(queues(), st.integers(0, 10**6))
def test_every_queue_comes_to_its_end_and_breaks_no_rule_on_the_way(queue, seed):
    chance = random.Random(seed)
    world = World(*queue)
    for _ in range(400):
        found = world.plan()
        world.apply(found)
        open_ = {e.number for e in world.entries.values() if e.state is not ENDED and not e.alive}
        acted = {action.number for action in found.actions}
        assert open_ <= acted | set(found.waits), "a command neither goes on nor says why not"
        if all(e.state is ENDED for e in world.entries.values()):
            return
        world.pass_time(chance)
    raise AssertionError("the queue never came to its end")


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(queues(), st.integers(0, 10**6), st.integers(0, 20), st.sampled_from(NAMES))
def test_a_stop_that_comes_at_any_moment_stops_what_stands_before_it(queue, seed, moment, stage):
    chance = random.Random(seed)
    world = World(*queue)
    for _ in range(moment):
        world.apply(world.plan())
        world.pass_time(chance)
    stop = max(world.entries, default=0) + 1
    reached = {
        e.number: e.alive
        for e in world.entries.values()
        if e.command == RunCommand(stage) and e.state is not ENDED
    }
    world.entries[stop] = entry(stop, f"stop:{stage}")
    for _ in range(400):
        found = world.plan()
        started = {a.number for a in found.actions if isinstance(a, Start)}
        assert not started & set(reached), "started after it was stopped"
        world.apply(found)
        if all(e.state is ENDED for e in world.entries.values()):
            break
        world.pass_time(chance)
    assert world.entries[stop].result is Result.SUCCESS
    for number, alive in reached.items():
        # One that was alive may have ended by itself before it was asked.
        assert alive or world.entries[number].result is Result.STOPPED
