"""Makes figures of a race: ours against the floor and against the others, then everybody's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocol.bench import Figure
from trainer.bench.contestant import Contestant, Part
from trainer.loader import Kernel

# How many times memcpy each may take, with a compiled kernel and with NumPy alone.
GOALS: Mapping[tuple[str, Kernel], str] = {
    ("kernel", Kernel.NUMBA): "<= 2.5",
    ("kernel", Kernel.NUMPY): "<= 6",
    ("loader", Kernel.NUMBA): "<= 5",
    ("loader", Kernel.NUMPY): "<= 12",
}
AGAINST_FASTEST = ">= 10"
AGAINST_USUAL = ">= 30"
USUAL = "DataLoader on datasets, torch format, 2 workers"
UNIT = "ms a batch"
FLOOR = "memcpy"


def race_figures(contestants: Sequence[Contestant], ms: Mapping[str, float]) -> list[Figure]:
    """Return the figures of a race.

    `ms` is each title's milliseconds for a batch of the plan; who is not there fell out.
    """
    by_part = {part: [c for c in contestants if c.part is part and c.title in ms] for part in Part}
    (floor,) = (ms[c.title] for c in by_part[Part.FLOOR])
    return [
        *_against_floor(by_part[Part.OURS], ms, floor),
        *_against_peers(by_part[Part.OURS], by_part[Part.PEER], ms),
        *(
            Figure(name=c.title, value=ms[c.title], unit=UNIT, baseline=floor, baseline_name=FLOOR)
            for part in (Part.OURS, Part.PEER, Part.FED)
            for c in sorted(by_part[part], key=lambda c: ms[c.title])
        ),
    ]


def _against_floor(
    ours: Sequence[Contestant], ms: Mapping[str, float], floor: float
) -> list[Figure]:
    goals = {f"{name}, {kernel}": goal for (name, kernel), goal in GOALS.items()}
    return [
        Figure(
            name=f"{contestant.title}, against memcpy",
            value=ms[contestant.title] / floor,
            unit="ratio",
            goal=goals[contestant.name],
        )
        for contestant in ours
    ]


def _against_peers(
    ours: Sequence[Contestant], peers: Sequence[Contestant], ms: Mapping[str, float]
) -> list[Figure]:
    """Return how many times faster our loader is, with the kernel that is used by default."""
    mine = next((ms[c.title] for c in ours if c.name.startswith("loader")), None)
    if mine is None or not peers:
        return []
    fastest = min(peers, key=lambda c: ms[c.title])
    compared = [("the fastest peer", fastest, AGAINST_FASTEST)]
    compared += [("the usual loader", c, AGAINST_USUAL) for c in peers if c.name == USUAL]
    return [
        Figure(
            name=f"ours: loader, times faster than {than}",
            value=ms[other.title] / mine,
            unit="ratio",
            goal=goal,
            baseline=1.0,
            baseline_name=other.name,
        )
        for than, other, goal in compared
    ]
