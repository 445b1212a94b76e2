"""What is refused is counted and not read again, in bounded memory."""

from __future__ import annotations

import logging

import pytest

from syncd.delivery.refusals import (
    FIRST_PAUSE_SECONDS,
    FREE_LOOKS,
    LONGEST_PAUSE_SECONDS,
    TOLD_SECONDS,
    Refusals,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_refused_is_counted_once_and_never_due_again() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    assert refusals.is_due("a")
    for _ in range(3):
        refusals.refuse("a", "forged")
    refusals.refuse("b", "foreign")
    assert (refusals.count, refusals.last) == (2, "foreign")
    clock.now = 1e9
    assert not refusals.is_due("a")
    assert refusals.is_refused("a")
    assert not refusals.is_refused("c")


def test_what_was_refused_is_told_with_its_time_and_not_for_ever() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    assert refusals.told() == ""
    refusals.refuse("a", "forged")
    assert refusals.told().startswith("1 object was refused; the last, at 20")
    assert refusals.told().endswith("Z: forged")
    clock.now += TOLD_SECONDS + 1
    assert refusals.told() == ""
    refusals.refuse("b", "foreign")
    assert refusals.told().startswith("2 objects were refused")


def test_what_may_yet_turn_out_well_is_looked_at_ever_more_rarely_but_always_again() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(FREE_LOOKS - 1):
        refusals.postpone("a")
        assert refusals.is_due("a")
    pause = FIRST_PAUSE_SECONDS
    for _ in range(50):
        refusals.postpone("a")
        clock.now += pause * 0.999
        assert not refusals.is_due("a")
        assert not refusals.is_refused("a")
        clock.now += pause * 0.002
        assert refusals.is_due("a")
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    refusals.forget("a")
    refusals.postpone("a")
    assert refusals.is_due("a")


def test_a_flood_is_counted_and_neither_remembered_nor_logged_without_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.refusals.REMEMBERED", 1000)
    refusals = Refusals()
    flood = 5000
    with caplog.at_level(logging.WARNING):
        for number in range(flood):
            refusals.refuse(f"object {number}", "forged")
    assert refusals.count == flood
    assert len(refusals._looks) == 1000
    assert refusals.is_refused(f"object {flood - 1}")
    assert len(caplog.records) < 50
