"""What happens in an episode, decided beforehand: a pure function of its seed.

An episode has lanes. Each is a list of steps, one kill each, and the next is taken up when the one
before has killed or has waited too long; the lanes go on side by side, so a process may die while
the other end, or its own supervisor, is dead already.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

ROLES = ("controller", "worker", "supervisor")
# How often a command is appended, in parts.
COMMANDS = {
    "run:quick": 8,
    "run:next": 3,
    "run:flaky": 2,
    "run:bad": 1,
    "run:slow": 2,
    "run:tree": 1,
    "stop:slow": 1,
    "stop:tree": 1,
    "stop:quick": 1,
    "sh": 4,
    "run:nope": 1,
    "malformed": 1,
}
PAIR_SHARE = 0.3
SHOTS_SHARE = 0.75
EDIT_SHARE = 0.15
TARGETS = (
    *("controller", "worker", "controller's rclone", "worker's rclone"),
    *("supervisor", "stage", "both daemons", "supervisor and stage", "all of the VM"),
)


@dataclass(frozen=True)
class Shot:
    """A SIGKILL at a point that is met for the `times`-th time (0: at each point in turn, see
    `crashpoints`); `then`, armed before the process is started again, kills it in its recovery."""

    point: str
    times: int = 1
    then: Shot | None = None


@dataclass(frozen=True)
class Kill:
    """A SIGKILL from outside, some time after the step before."""

    target: str
    after: float


@dataclass(frozen=True)
class LoseVm:
    """The VM goes, its disk with it, and another one comes."""


@dataclass(frozen=True)
class Replace:
    """The VM is suspended; another one comes; the suspended one wakes up `after` seconds later."""

    after: float


Step: TypeAlias = Shot | Kill | LoseVm | Replace


@dataclass(frozen=True)
class Plan:
    """An episode. `pauses` are for how long a daemon stays dead, in turn; `commands` what a person
    appends, in turn; at those in `edits` the file is saved anew, re-ordered, as editors do. A
    first dozen is appended, and then so many a kill, as long as there are steps to come; with
    `all_commands` it goes on until all are. A shot is given up after `shot_seconds`. All
    must be well within `patience` seconds after the last kill. After `state_packs` packs a state
    says all of them again; that makes good a pack that was lost, so not all have few."""

    lanes: Sequence[Sequence[Step]]
    commands: Sequence[str]
    pauses: Sequence[float] = (0.0,)
    edits: frozenset[int] = field(default_factory=frozenset)
    patience: float = 60.0
    shot_seconds: float = 2.0
    state_packs: int = 12
    commands_a_kill: float = 0.5
    all_commands: bool = False


def random_plan(seed: str, points: Sequence[str], kills: int) -> Plan:
    """Return an episode of about so many kills at `points`, and others at any moment."""
    rng = random.Random(seed)
    shots = {role: _shots(rng, role, points) for role in ROLES}
    lanes: list[list[Step]] = [[], [], [], []]
    for _ in range(kills):
        if rng.random() < SHOTS_SHARE:
            at = rng.randrange(3)
            lanes[at].append(next(shots[ROLES[at]]))
        else:
            lanes[3].append(Kill(rng.choice(TARGETS), round(rng.uniform(0.0, 1.0), 3)))
    chance = rng.random()
    if chance < 0.45:
        machine = LoseVm() if chance < 0.3 else Replace(round(rng.uniform(0.2, 1.5), 3))
        lanes[3].insert(rng.randint(0, len(lanes[3])), machine)
    commands = random_commands(rng, 4 * kills + 20)
    edits = frozenset(n for n in range(len(commands)) if rng.random() < EDIT_SHARE)
    pauses = [rng.choice([0.0, 0.0, 0.1, 0.4, 1.0]) for _ in range(20)]
    return Plan(
        lanes=lanes,
        commands=commands,
        pauses=pauses,
        edits=edits,
        state_packs=rng.choice([12, 300]),
    )


def _shots(rng: random.Random, role: str, points: Sequence[str]) -> Iterator[Shot]:
    """Yield shots at a role's points, each point as often as any other."""
    own = sorted(
        p for p in points if p.startswith(role) or (role, p[:5]) == ("supervisor", "stage")
    )
    if not own:
        raise ValueError(f"no points of the {role} are known")
    while True:
        for point in rng.sample(own, len(own)):
            then = Shot(f"{role}:*", rng.randint(1, 60)) if rng.random() < PAIR_SHARE else None
            yield Shot(point, rng.choice([1, 1, 1, 2, 3]), then)


def random_commands(rng: random.Random, count: int) -> list[str]:
    """Return commands in random order, the first of each kind among the first."""
    kinds = list(COMMANDS)
    first = rng.sample(kinds, len(kinds))
    more = rng.choices(kinds, [COMMANDS[kind] for kind in kinds], k=max(count - len(first), 0))
    return first + more


def sweep(roles: Sequence[str], commands: Sequence[str]) -> Plan:
    """Return an episode that kills processes of these roles once at each point, one after the
    other, until no point is met any more that nobody has died at."""
    lanes = [[Shot(f"{role}:*", 0)] for role in roles]
    return Plan(lanes=lanes, commands=commands, commands_a_kill=100)
