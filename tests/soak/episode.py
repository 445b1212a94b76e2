"""One episode: carries out a plan, waits until all is quiet, and judges what is left."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence import Appended, Evidence
from gather import count_objects, leftovers, read_testimony, said_of_faults, see
from invariants import Harm, Violation, judge
from looks import Looks
from person import RETRIES
from plan import Kill, LoseVm, Plan, Replace, Shot, Step
from world import End, World

from protocol.journal import fold, parse_journal
from protocol.states import State

TICK_SECONDS = 0.01
LOOK_SECONDS = 0.05
EDIT_EVERY = 7
OPEN_COMMANDS = 3
FIRST_COMMANDS = 14
SWEEP_COMMANDS = 4
PLAN_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an episode came to. `kills` counts by point or target; `missed` are shots that nobody
    met in time; `points` were met."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: Sequence[str] = ()
    points: Sequence[str] = ()
    looks: int = 0
    seconds: float = 0.0
    violations: Sequence[Violation] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "kills": dict(self.kills)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        violations = [(Harm(harm), text) for harm, text in value["violations"]]
        return cls(**{**value, "kills": Counter(value["kills"]), "violations": violations})


class _Lane:
    """Steps that come one after the other."""

    def __init__(self, episode: Episode, steps: Sequence[Step]) -> None:
        self._episode = episode
        self._steps = list(reversed(steps))
        self._step: Step | None = None
        self._since = 0.0
        self._ended = 0
        self._shot = ""
        self._suspended: End | None = None

    def done(self) -> bool:
        return self._step is None and not self._steps

    def begin(self) -> None:
        """Take up the next step if none is under way."""
        if self._step is None and self._steps:
            self._step, self._since = self._steps.pop(), time.monotonic()
            self._ended = self._episode.count_ended()
            if isinstance(self._step, Shot):
                self._shot = self._episode.arm(self._step)

    def fired(self, shot: str) -> None:
        """Hear of a shot that has fired: that of a pair is armed before anything is restarted."""
        if shot == self._shot and isinstance(self._step, Shot):
            again = self._step if self._step.times == 0 else self._step.then
            if again:
                self._steps.append(again)
            self._step = None
            self.begin()

    def go_on(self) -> None:
        """Do what is due."""
        self.begin()
        waited = time.monotonic() - self._since
        step, episode = self._step, self._episode
        if isinstance(step, Shot) and self._in_vain(step, waited):
            episode.miss(step, self._shot)
            self._step = None
        elif isinstance(step, Kill) and waited > step.after:
            episode.kill(step.target)
            self._step = None
        elif isinstance(step, LoseVm):
            episode.lose_vm()
            self._step = None
        elif isinstance(step, Replace):
            self._replace(step, waited)

    def _in_vain(self, step: Shot, waited: float) -> bool:
        """Whether a shot has waited long enough; one at any new point, for so many commands."""
        if step.times == 0 and self._episode.goes_on():
            return self._episode.count_ended() - self._ended > SWEEP_COMMANDS
        return waited > self._episode.plan.shot_seconds

    def _replace(self, step: Replace, waited: float) -> None:
        world = self._episode.world
        if self._suspended is None:
            # One that has not said hello yet would be the newer one when it wakes up.
            if world.vm_has_joined():
                self._suspended = world.suspend_vm()
                self._episode.kills["the VM suspended and replaced"] += 1
                self._since = time.monotonic()
        elif waited > step.after:
            world.wake(self._suspended)
            self._suspended = self._step = None


class Episode:
    """Carries out one plan in a folder of its own."""

    def __init__(
        self, plan: Plan, folder: Path, *, seed: str, remote: str = "local", fault: str = ""
    ) -> None:
        self.world = World(folder, remote, state_packs=plan.state_packs, fault=fault)
        self.kills: Counter[str] = Counter()
        self.plan = plan
        self._rng = random.Random(seed)
        self._appended: list[Appended] = []
        self._missed: list[str] = []
        self._shots = 0
        self._looks = Looks()
        self._looked = 0.0
        self._pause = 0
        self._lanes = [_Lane(self, lane) for lane in plan.lanes]

    def run(self) -> Outcome:
        """Carry out the plan; return what it came to. Ends every process of it, come what may."""
        began = time.monotonic()
        try:
            self._carry_out()
            violations = self._until_quiet()
        finally:
            self.world.close()
        return Outcome(
            kills=self.kills,
            missed=self._missed,
            points=self.world.points(),
            looks=self._looks.count,
            seconds=round(time.monotonic() - began, 1),
            violations=violations,
        )

    # For the lanes

    def arm(self, shot: Shot) -> str:
        self._shots += 1
        return self.world.arm(self._shots, shot.point, shot.times)

    def miss(self, shot: Shot, name: str) -> None:
        self._missed.append(shot.point)
        self.world.disarm(name)

    def kill(self, target: str) -> None:
        if self.world.kill(target, self._rng):
            self.kills[f"any moment: {target}"] += 1

    def lose_vm(self) -> None:
        self.world.lose_vm()
        self.kills["the VM lost with its disk"] += 1

    # The plan

    def _carry_out(self) -> None:
        deadline = time.monotonic() + PLAN_SECONDS
        while not self._is_done() and time.monotonic() < deadline:
            for lane in self._lanes:
                lane.go_on()
            self._tick()
            self._feed()
        (self.world.witness / "go").touch()

    def _is_done(self) -> bool:
        appended = len(self._appended) == len(self.plan.commands) or not self.plan.all_commands
        return appended and all(lane.done() for lane in self._lanes)

    def _tick(self) -> None:
        pauses = self.plan.pauses
        self._hear()
        self.world.tick(pauses[self._pause % len(pauses)])
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._pause += 1
            for end in self.world.ends:
                self._looks.look(end.layout)
            self._looked = time.monotonic()
        time.sleep(TICK_SECONDS)

    def _hear(self) -> None:
        for shot, point in self.world.kills():
            self.kills[point] += 1
            for lane in self._lanes:
                lane.fired(shot)

    def _feed(self) -> None:
        """Append a command when few are open, as the laptop sees it."""
        at = len(self._appended)
        enough = FIRST_COMMANDS + self.plan.commands_a_kill * (
            self.kills.total() + len(self._missed)
        )
        if at >= min(len(self.plan.commands), enough):
            return
        if at - self.count_ended() >= OPEN_COMMANDS:
            return
        if at % EDIT_EVERY == EDIT_EVERY - 1:
            self.world.person.edit_payload()
        line = self.world.person.line(self.plan.commands[at], at)
        self._appended.append(Appended(line, self.world.person.version))
        if at in self.plan.edits:
            self.world.person.save_queue(line, self._rng)
        else:
            self.world.person.append(line)

    def goes_on(self) -> bool:
        """Whether there are commands that have not ended, or are still to be appended."""
        return self.count_ended() < len(self.plan.commands)

    def count_ended(self) -> int:
        try:
            data = self.world.laptop.layout.journal.read_bytes()
        except FileNotFoundError:
            return 0
        return data.count(b'"state": "ended"')

    # The end

    def _until_quiet(self) -> list[Violation]:
        """Kill no more, wait until nothing is left to be done, and judge."""
        deadline = time.monotonic() + self.plan.patience
        while not self._all_ended() and time.monotonic() < deadline:
            self._tick()
        violations = judge(self._evidence())
        while violations and time.monotonic() < deadline:
            for _ in range(20):
                self._tick()
            violations = judge(self._evidence())
        alive = self.world.stop()
        return judge(self._evidence(alive=alive, left=leftovers(self.world)))

    def _all_ended(self) -> bool:
        path = self.world.laptop.layout.journal
        records = fold(parse_journal(path.read_bytes())[0]) if path.exists() else {}
        ended = sum(record.state is State.ENDED for record in records.values())
        return ended >= len(self._appended)

    def _evidence(self, alive: Sequence[str] = (), left: Sequence[str] = ()) -> Evidence:
        world = self.world
        return Evidence(
            appended=self._appended,
            testimony=read_testimony(world.witness / "log"),
            laptop=see(world.laptop),
            vm=see(world.vm),
            machines=len(world.vms),
            hits=world.hits,
            arrived=world.arrived,
            retries=RETRIES,
            said=said_of_faults(world),
            bad_looks=self._looks.bad,
            alive=alive,
            leftovers=left,
            objects=count_objects(world),
        )
