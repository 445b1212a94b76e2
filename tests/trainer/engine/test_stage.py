"""Tests of trainer/engine/stage.py."""

from __future__ import annotations

import pytest

from protocol.errors import DataError
from trainer.engine.stage import (
    Activity,
    Item,
    StageClock,
    StageError,
    describe_failure,
    failures_named,
)

ITEM = Item(seq=12, epoch=3, payload=1, sample_ids=[f"clip-{n}" for n in range(20)])


def test_an_item_keeps_its_number_when_its_payload_changes() -> None:
    changed = Item(seq=5, epoch=1, payload="a", sample_ids=["x"], last=True).with_payload(
        2, nbytes=8
    )
    assert changed == Item(seq=5, epoch=1, payload=2, nbytes=8, sample_ids=["x"], last=True)


def test_a_failure_names_stage_item_and_the_first_samples() -> None:
    assert describe_failure("train", ITEM) == (
        "stage 'train' failed on item 12 (epoch 3, 20 samples: clip-0, clip-1, clip-2, clip-3, "
        "clip-4, clip-5, clip-6, clip-7, ...)"
    )
    assert describe_failure("source", None) == "stage 'source' failed between items"


def test_what_fails_becomes_a_stage_error_with_its_cause() -> None:
    cause = ZeroDivisionError("division by zero")
    with pytest.raises(StageError) as caught, failures_named("train", ITEM):
        raise cause
    error = caught.value
    assert (error.stage, error.seq, error.__cause__) == ("train", 12, cause)
    assert error.sample_ids == tuple(ITEM.sample_ids)


def test_a_users_error_stays_one_and_says_where_it_happened() -> None:
    with pytest.raises(DataError) as caught, failures_named("source"):
        raise DataError("read the pool", why="cut short")
    assert caught.value.__notes__ == ["stage 'source' failed between items"]


def test_an_interrupt_is_no_failure_of_the_stage() -> None:
    with pytest.raises(KeyboardInterrupt), failures_named("train", ITEM):
        raise KeyboardInterrupt


def test_a_clock_counts_time_by_activity_also_when_work_fails() -> None:
    clock = StageClock()
    with pytest.raises(ValueError, match="x"), clock.measure(Activity.BUSY):
        raise ValueError("x")
    clock.add(Activity.STARVED, 2.0)
    assert clock.seconds[Activity.BUSY] > 0
    assert clock.report()["starved_s"] == 2.0
    assert set(clock.report()) == {"items", "busy_s", "starved_s", "blocked_s"}
