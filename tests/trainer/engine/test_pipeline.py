"""Tests of trainer/engine/pipeline.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from protocol.errors import DataError, UsageError
from trainer.engine.pipeline import Pipeline
from trainer.engine.stage import Item, StageError, Stateless


class Counting:
    """Numbers 0 to `count` - 1, three items an epoch."""

    name = "source"

    def __init__(self, count: int = 7) -> None:
        self.count = count
        self.start = 0

    def __iter__(self) -> Iterator[Item[int]]:
        for seq in range(self.start, self.count):
            yield Item(
                seq=seq,
                epoch=seq // 3,
                payload=seq,
                sample_ids=[f"clip-{seq}"],
                last=seq % 3 == 2 or seq == self.count - 1,
            )

    def state_dict(self, consumed: int) -> Mapping[str, Any]:
        return {"consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["consumed"]


class Double(Stateless):
    name = "double"

    def process(self, item: Item[int]) -> Item[int]:
        return item.with_payload(item.payload * 2)


class Sum:
    """Adds up what passes, and fails at an item if told to."""

    name = "sum"

    def __init__(self, fail_at: int | None = None) -> None:
        self.total = 0
        self.fail_at = fail_at
        self.closed = 0

    def process(self, item: Item[int]) -> Item[int]:
        if item.seq == self.fail_at:
            raise RuntimeError("out of memory")
        self.total += item.payload
        return item.with_payload(self.total)

    def state_dict(self) -> Mapping[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]

    def close(self) -> None:
        self.closed += 1


def test_every_item_passes_every_stage_in_order() -> None:
    seen: list[tuple[int, int]] = []
    total = Sum()
    pipeline = Pipeline(
        Counting(),
        [Double(), total],
        after_step=[lambda item: seen.append((item.seq, item.payload))],
    )
    pipeline.run()
    assert seen == [(0, 0), (1, 2), (2, 6), (3, 12), (4, 20), (5, 30), (6, 42)]
    assert (pipeline.consumed, total.total, total.closed) == (7, 42, 1)


def test_epoch_hooks_are_called_after_the_item_that_ends_the_epoch() -> None:
    seen: list[str] = []
    Pipeline(
        Counting(),
        [Double()],
        after_step=[lambda item: seen.append(f"step {item.seq}")],
        after_epoch=[lambda item: seen.append(f"epoch {item.epoch}")],
    ).run()
    assert seen == [
        *("step 0", "step 1", "step 2", "epoch 0"),
        *("step 3", "step 4", "step 5", "epoch 1"),
        *("step 6", "epoch 2"),
    ]


@pytest.mark.parametrize("at", range(7))
def test_a_state_taken_in_any_hook_resumes_exactly_there(at: int) -> None:
    states: list[dict[str, Any]] = []
    first = Pipeline(Counting(), [Double(), Sum()])
    first.after_step.append(lambda item: states.append(first.state_dict()))
    first.run()

    total = Sum()
    second = Pipeline(Counting(), [Double(), total])
    second.load_state_dict(states[at])
    assert second.consumed == at + 1
    second.run()
    assert (second.consumed, total.total) == (7, 42)


def test_a_state_of_other_stages_is_refused() -> None:
    state = Pipeline(Counting(), [Double()]).state_dict()
    with pytest.raises(DataError, match=r"stages \['double'\], this run \['double', 'sum'\]"):
        Pipeline(Counting(), [Double(), Sum()]).load_state_dict(state)


def test_a_failing_stage_is_named_and_all_are_closed() -> None:
    total = Sum(fail_at=4)
    pipeline = Pipeline(Counting(), [Double(), total])
    with pytest.raises(StageError, match=r"stage 'sum' failed on item 4 .*clip-4") as caught:
        pipeline.run()
    assert str(caught.value.__cause__) == "out of memory"
    assert (pipeline.consumed, total.closed) == (4, 1)


def test_two_stages_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two stages have one name"):
        Pipeline(Counting(), [Double(), Double()])


def test_the_clocks_of_every_stage_add_up_to_the_time_the_items_took() -> None:
    class Busy(Stateless):
        name = "busy"

        def process(self, item: Item[int]) -> Item[int]:
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                pass
            return item

    pipeline = Pipeline(Counting(), [Double(), Busy(), Sum()])
    begin = time.perf_counter()
    pipeline.run()
    wall = time.perf_counter() - begin
    report = pipeline.report()
    totals = [sum(v for k, v in r.items() if k.endswith("_s")) for r in report.values()]
    assert max(totals) - min(totals) < 1e-6
    assert totals[0] <= wall
    assert report["busy"]["busy_s"] >= 7 * 0.002
    assert report["double"]["blocked_s"] >= 7 * 0.002
    assert report["sum"]["starved_s"] >= 7 * 0.002
    assert all(r["items"] == 7 for r in report.values())
