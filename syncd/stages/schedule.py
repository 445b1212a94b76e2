"""What to do next with the queue: a pure function of what is known.

`plan` looks at the commands in file order and says which to end, which to claim, which runs to
start or to stop, and for the rest, what they wait for. The worker does it; nothing here has an
effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.names import SHELL_STAGE, suggest
from protocol.queue import Command, RunCommand, ShellCommand, StopCommand
from protocol.stages import Stage
from protocol.states import Result, State

GPU_TOLERANCE = 1e-9
MAX_BACKOFF_SECONDS = 300.0
MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command of the queue as it stands.

    `alive` says that an attempt of it has a process; `inherited` that another worker claimed it;
    `published` that its newest journal record is on the remote; `not_before` is when a retry may
    start, by the caller's clock; `attempts` counts those that were started.
    """

    number: int
    line: str
    run_id: str
    command: Command | None
    error: str = ""
    snapshot: int = 0
    state: State = State.QUEUED
    result: Result | None = None
    alive: bool = False
    inherited: bool = False
    published: bool = True
    not_before: float = 0.0
    attempts: int = 0

    @property
    def stage(self) -> str:
        """The stage that it runs or stops; `sh` for a shell command."""
        if isinstance(self.command, RunCommand | StopCommand):
            return self.command.stage
        return SHELL_STAGE if isinstance(self.command, ShellCommand) else ""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What this worker may do. `stages` None means any.

    `unsealed_lines` are commands that someone without a key may have given.
    """

    stages: frozenset[str] | None = None
    shell: bool = True
    unsealed_lines: bool = False


@dataclass(frozen=True)
class Payload:
    """A payload that is ready: its order, and its stages or why they cannot be read."""

    order: int
    stages: Mapping[str, Stage] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class End:
    """End a command that has no process."""

    number: int
    result: Result
    cause: str


@dataclass(frozen=True)
class Claim:
    """Record that the command is taken; it is started once that is known on the remote."""

    number: int


@dataclass(frozen=True)
class Start:
    """Start the next attempt; `after` maps stages that it comes after to runs that satisfied it."""

    number: int
    payload: int
    after: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Ask the living attempt of a run to end."""

    number: int


Action: TypeAlias = End | Claim | Start | Stop


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The actions, in order, and why each other command waits."""

    actions: tuple[Action, ...] = ()
    waits: Mapping[int, str] = field(default_factory=dict)


def backoff(attempts: int) -> float:
    """Return the seconds to wait before another attempt: 1, 2, 4, ... up to five minutes."""
    return min(2.0 ** min(max(attempts - 1, 0), 60), MAX_BACKOFF_SECONDS)


def _names(entries: Sequence[Entry]) -> str:
    named = ", ".join(entry.run_id for entry in entries[:MAX_NAMED])
    more = len(entries) - MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


class _Planner:
    """One call of `plan`: what was decided so far, while going through the commands in order."""

    def __init__(
        self,
        entries: Sequence[Entry],
        payloads: Mapping[int, Payload],
        shares: Mapping[int, float],
        policy: Policy,
        now: float,
    ) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.number)
        self.payloads = payloads
        self.policy = policy
        self.now = now
        self.runs_before: dict[str, Entry] = {}
        self.open_before: dict[str, list[Entry]] = {}
        self.stops = self._pending_stops()
        self.holders = self._holders()
        self.free = 1.0 - sum(shares.get(e.number, 0.0) for e in entries if e.alive)
        self.ended: dict[int, Result] = {
            e.number: e.result for e in entries if e.state is State.ENDED and e.result
        }
        self.actions: list[Action] = []
        self.waits: dict[int, str] = {}

    def _pending_stops(self) -> dict[int, Entry]:
        """The stop: line that reaches each run, by the run's number: the first one after it."""
        found: dict[int, Entry] = {}
        next_stop: dict[str, Entry] = {}
        for entry in reversed(self.entries):
            if isinstance(entry.command, StopCommand) and not entry.error:
                if entry.state is not State.ENDED:
                    next_stop[entry.stage] = entry
            elif isinstance(entry.command, RunCommand) and entry.stage in next_stop:
                found[entry.number] = next_stop[entry.stage]
        return found

    def _holders(self) -> dict[str, int]:
        """The command that each stage is taken by: one run at a time, its retries included."""
        begun = [e for e in self.entries if e.state in (State.CLAIMED, State.STARTED)]
        runs = [e for e in begun if not isinstance(e.command, StopCommand)]
        held = {e.stage: e.number for e in reversed(runs)}
        return held | {e.stage: e.number for e in runs if e.alive}

    def plan(self) -> Plan:
        for entry in self.entries:
            if entry.number not in self.ended:
                self._consider(entry)
                if isinstance(entry.command, RunCommand):
                    self.open_before.setdefault(entry.stage, []).append(entry)
            if isinstance(entry.command, RunCommand):
                self.runs_before[entry.stage] = entry
        return Plan(actions=tuple(self.actions), waits=self.waits)

    def _end(self, entry: Entry, result: Result, cause: str) -> None:
        self.actions.append(End(entry.number, result, cause))
        self.ended[entry.number] = result
        if self.holders.get(entry.stage) == entry.number:
            del self.holders[entry.stage]

    def _consider(self, entry: Entry) -> None:
        stop = self.stops.get(entry.number)
        if entry.alive:
            if stop and stop.state is State.QUEUED:
                self.actions.append(Stop(entry.number))
        elif entry.error or entry.command is None:
            self._end(entry, Result.REFUSED, entry.error or "not a command")
        elif stop:
            self._end(entry, Result.STOPPED, f"by command {stop.number}, {stop.line}")
        elif isinstance(entry.command, StopCommand):
            self._stop(entry)
        elif isinstance(entry.command, ShellCommand):
            self._shell(entry)
        else:
            self._run(entry)

    def _stop(self, entry: Entry) -> None:
        """End a stop: line once nothing that it reaches is alive.

        It is claimed when the living were asked. Until they have ended it goes on: one that ends
        by itself just then, and would be tried again, is still stopped.
        """
        reached = self.open_before.get(entry.stage, [])
        alive = self.open_before[entry.stage] = [other for other in reached if other.alive]
        if alive:
            if entry.state is State.QUEUED:
                self.actions.append(Claim(entry.number))
            self.waits[entry.number] = f"{_names(alive)} to end"
        elif reached:
            self._end(entry, Result.SUCCESS, f"stopped {_names(reached)}")
        elif entry.state is State.QUEUED:
            self._end(entry, Result.SUCCESS, "nothing to stop")
        else:
            self._end(entry, Result.SUCCESS, "what was alive has ended")

    def _shell(self, entry: Entry) -> None:
        holder = self.holders.get(SHELL_STAGE, entry.number)
        if not self.policy.shell:
            self._end(entry, Result.REFUSED, "this worker's policy allows no sh: commands")
        elif entry.inherited and entry.state is not State.QUEUED:
            self._end(entry, Result.LOST, "the worker that had claimed it is gone")
        elif entry.state is State.STARTED:
            self._end(entry, Result.LOST, "its process is gone")
        elif holder != entry.number:
            self.waits[entry.number] = "an earlier sh: command"
        elif entry.state is State.QUEUED:
            self.holders[SHELL_STAGE] = entry.number
            self.actions.append(Claim(entry.number))
        elif not entry.published:
            # At most once, on whatever machine: nobody else may find it unclaimed.
            self.waits[entry.number] = "its claim to reach the remote"
        else:
            self.actions.append(Start(entry.number, self._newest(0)))

    def _newest(self, at_least: int) -> int:
        return max((order for order in self.payloads if order >= at_least), default=0)

    def _run(self, entry: Entry) -> None:
        if self.policy.stages is not None and entry.stage not in self.policy.stages:
            why = f"this worker's policy does not allow the stage {entry.stage!r}"
            return self._end(entry, Result.REFUSED, why)
        payload = self._payload(entry)
        if payload is None:
            self.waits[entry.number] = "its payload to arrive"
            return None
        stage = payload.stages.get(entry.stage)
        if stage is None:
            why = payload.error or (
                f"stages.toml defines no stage {entry.stage!r}. "
                + suggest(entry.stage, payload.stages)
            )
            return self._end(entry, Result.REFUSED, why)
        after = self._after(entry, stage)
        if after is None:
            return None
        if wait := self._wait_for_room(entry, stage):
            self.waits[entry.number] = wait
            return None
        self.holders[entry.stage] = entry.number
        self.free -= stage.gpu
        self.actions.append(Start(entry.number, payload.order, after))
        return None

    def _payload(self, entry: Entry) -> Payload | None:
        """The newest payload for a new run; for one that was claimed, the one it was given."""
        if entry.state is State.QUEUED:
            return self.payloads.get(self._newest(entry.snapshot))
        return self.payloads.get(entry.snapshot)

    def _after(self, entry: Entry, stage: Stage) -> dict[str, str] | None:
        """The run that satisfied each `after`; None when the run must wait, or was ended."""
        found: dict[str, str] = {}
        for name in stage.after:
            newest = self.runs_before.get(name)
            if newest is None:
                self._end(entry, Result.SKIPPED, f"no run:{name} stands before it in the queue")
                return None
            result = self.ended.get(newest.number)
            if result is None:
                self.waits[entry.number] = f"after {newest.run_id}"
                return None
            if result is not Result.SUCCESS:
                self._end(entry, Result.SKIPPED, f"{newest.run_id} ended as {result}")
                return None
            found[name] = newest.run_id
        return found

    def _wait_for_room(self, entry: Entry, stage: Stage) -> str:
        if entry.not_before > self.now:
            return f"another attempt in {math.ceil(entry.not_before - self.now)} s"
        if self.holders.get(entry.stage, entry.number) != entry.number:
            return f"another run of {entry.stage}"
        if stage.gpu > self.free + GPU_TOLERANCE:
            return f"its share of the GPU, {stage.gpu:g}, of which {max(self.free, 0):g} is free"
        return ""


def plan(
    entries: Sequence[Entry],
    *,
    payloads: Mapping[int, Payload],
    shares: Mapping[int, float],
    policy: Policy,
    now: float,
) -> Plan:
    """Decide what to do next.

    `payloads` are those that are ready, by order; `shares` the GPU share of each living run, by
    number; `now` is in seconds of the clock of `not_before`.
    """
    return _Planner(entries, payloads, shares, policy, now).plan()
