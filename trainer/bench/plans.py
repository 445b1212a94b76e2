"""Plans: what share of a batch is real tokens, how long a plan takes, and how long to resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from protocol.bench import Figure
from trainer.bench.batches import BUDGET
from trainer.bench.interleaved import medians, seconds
from trainer.loader import Loader, Packed, Padded, Shuffled
from trainer.loader.batching import Batching
from trainer.loader.rows import Rows as Source

BATCHINGS: Mapping[str, Batching] = {
    "bucketed": Padded(budget=BUDGET),
    "packed": Packed(budget=BUDGET),
}
ENOUGH = {"bucketed": ">= 97", "packed": ">= 99.5"}


def real_tokens(source: Source) -> list[Figure]:
    """Return the share of all batches' slots that hold a token."""
    return [
        Figure(
            name=f"plan: real tokens in the budget, {name}",
            value=_share(source, batching) * 100,
            unit="%",
            goal=ENOUGH[name],
            baseline=_unsorted(source) * 100,
            baseline_name="as the rows come",
        )
        for name, batching in BATCHINGS.items()
    ]


def _share(source: Source, batching: Batching) -> float:
    plan, _ = batching.plan(source, Shuffled(len(source), seed=0).rows(0), 0, 0)
    return float(source.lengths.sum()) / (len(plan) * BUDGET)


def _unsorted(source: Source) -> float:
    """Return the share where rows are batched in random order, unsorted."""
    count = longest = batches = 0
    for length in source.lengths[Shuffled(len(source), seed=0).rows(0)].tolist():
        longest = max(longest, length)
        count += 1
        if count * longest > BUDGET:
            batches, count, longest = batches + 1, 1, length
    return float(source.lengths.sum()) / ((batches + 1) * BUDGET)


def planning(source: Source) -> list[Figure]:
    """Return how long it takes to order an epoch's rows and to put them into batches."""

    def planned(batching: Batching) -> Callable[[], float]:
        def plan() -> None:
            batching.plan(source, Shuffled(len(source), seed=0).rows(0), 0, 0)

        return lambda: seconds(plan)

    found = medians({name: planned(batching) for name, batching in BATCHINGS.items()})
    # The goal is for 200,000 rows; fewer are held to it too.
    return [
        Figure(name=f"plan: {len(source)} rows, {name}", value=spent, unit="s", goal="<= 0.2")
        for name, spent in found.items()
    ]


def resuming(source: Source) -> list[Figure]:
    """Return how long the first batch takes after a state was loaded, late in an epoch or early."""
    state = Loader(source, BATCHINGS["bucketed"]).state_dict()
    steps = len(Loader(source, BATCHINGS["bucketed"]))

    def resumed(step: int) -> Callable[[], float]:
        def first_batch() -> None:
            loader = Loader(source, BATCHINGS["bucketed"])
            loader.load_state_dict({**state, "step": step})
            try:
                next(iter(loader))
            finally:
                loader.close()

        return lambda: seconds(first_batch)

    at = {"first": 0, "middle": steps // 2, "last": steps - 1}
    found = medians({name: resumed(step) for name, step in at.items()})
    late = {f"at the {name} step": found[name] for name in ("first", "middle")}
    figure = Figure(name="plan: resume at the last step", value=found["last"], unit="s")
    ratio = Figure(
        name="plan: resume at the last step, against the first",
        value=found["last"] / found["first"],
        unit="ratio",
        goal="<= 1.2",
    )
    return [*figure.beside(late), ratio]


def correlation(source: Source) -> Figure:
    """Return how much a row's place in the epoch says of its length, buckets and all."""
    rows = Shuffled(len(source), seed=0).rows(0)
    plan, _ = BATCHINGS["bucketed"].plan(source, rows, 0, 0)
    found = np.corrcoef(np.arange(len(plan.rows)), source.lengths[plan.rows])[0, 1]
    return Figure(
        name="plan: correlation of length and place, bucketed",
        value=abs(float(found)),
        unit="ratio",
    )
