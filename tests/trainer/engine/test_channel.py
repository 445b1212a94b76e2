"""Tests of trainer/engine/channel.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.engine.channel import (
    Cancellation,
    CancelledError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
)

R = TypeVar("R")
SOON_S = 10.0


@contextmanager
def waiting(channel: Channel[int], work: Callable[[], R]) -> Iterator[Future[R]]:
    """Run `work` in a thread and enter the block once it waits on the channel."""
    waits = threading.Event()
    condition = channel._condition
    wait_for = condition.wait_for

    def announced(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            waits.set()
        return wait_for(predicate, timeout)

    condition.wait_for = announced  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(work)
        assert waits.wait(SOON_S)
        yield future


def filled(*sizes: int, max_bytes: int = 100, max_items: int = 100) -> Channel[int]:
    channel: Channel[int] = Channel("test", max_bytes=max_bytes, max_items=max_items)
    for number, size in enumerate(sizes):
        channel.put(number, size)
    return channel


def test_items_come_out_in_the_order_they_went_in() -> None:
    channel = filled(1, 1, 1)
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "max_items"), [((60, 40), 100), ((1, 1, 1), 3)], ids=["bytes", "items"]
)
def test_a_put_waits_for_room_in_bytes_or_items(sizes: tuple[int, ...], max_items: int) -> None:
    channel = filled(*sizes, max_items=max_items)
    with waiting(channel, lambda: channel.put(99, 1)) as put:
        assert not put.done()
        assert channel.get() == 0
        put.result(SOON_S)
    assert len(channel) == len(sizes)


def test_an_item_larger_than_the_bound_passes_alone() -> None:
    channel = filled(10)
    with waiting(channel, lambda: channel.put(1, 1000)) as put:
        assert not put.done()
        channel.get()
        put.result(SOON_S)
    assert channel.occupancy == 1.0
    with pytest.raises(ChannelTimeoutError):
        channel.put(2, 1, timeout=0)
    assert channel.get() == 1


def test_a_get_waits_for_an_item() -> None:
    channel = filled()
    with waiting(channel, channel.get) as got:
        channel.put(7, 1)
        assert got.result(SOON_S) == 7


def test_a_blocked_put_wakes_when_the_channel_closes() -> None:
    channel = filled(100)
    with waiting(channel, lambda: channel.put(1, 1)) as put:
        channel.close()
        with pytest.raises(ChannelClosedError):
            put.result(SOON_S)


def test_a_blocked_get_wakes_when_the_channel_closes() -> None:
    channel = filled()
    with waiting(channel, channel.get) as got:
        channel.close()
        with pytest.raises(ChannelClosedError):
            got.result(SOON_S)


def test_what_is_in_a_closed_channel_can_still_be_taken() -> None:
    channel = filled(1, 1)
    channel.close()
    assert [channel.get(), channel.get()] == [0, 1]
    with pytest.raises(ChannelClosedError):
        channel.get()
    with pytest.raises(ChannelClosedError):
        channel.put(3, 1)


def test_waiting_ends_at_the_timeout() -> None:
    with pytest.raises(ChannelTimeoutError, match="get on the channel 'test'"):
        filled().get(timeout=0.01)
    with pytest.raises(ChannelTimeoutError, match="put on the channel 'test'"):
        filled(100).put(1, 1, timeout=0.01)


def test_a_failure_elsewhere_reaches_whoever_waits() -> None:
    cancellation = Cancellation()
    channel: Channel[int] = Channel("test", max_bytes=10, cancellation=cancellation)
    failure = RuntimeError("the drafter ran out of memory")
    with waiting(channel, channel.get) as got:
        assert cancellation.cancel(failure)
        with pytest.raises(CancelledError) as caught:
            got.result(SOON_S)
    assert caught.value.__cause__ is failure
    with pytest.raises(CancelledError):
        channel.put(1, 1)


def test_only_the_first_failure_counts() -> None:
    cancellation = Cancellation()
    first = RuntimeError("first")
    assert cancellation.cancel(first)
    assert not cancellation.cancel(RuntimeError("second"))
    assert cancellation.error is first


def test_a_call_registered_after_the_cancellation_is_made_at_once() -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    called = threading.Event()
    cancellation.on_cancel(called.set)
    assert called.is_set()


def test_occupancy_is_the_fill_and_its_mean_is_weighted_by_time() -> None:
    now = [0.0]
    channel: Channel[int] = Channel("test", max_bytes=100, clock=lambda: now[0])
    now[0] = 1.0  # empty for 1 s
    channel.put(0, 50)
    now[0] = 3.0  # half full for 2 s
    channel.put(1, 50)
    assert channel.occupancy == 1.0
    now[0] = 4.0  # full for 1 s
    channel.get()
    assert channel.occupancy == 0.5
    assert channel.mean_occupancy == pytest.approx((0.0 * 1 + 0.5 * 2 + 1.0 * 1) / 4)
    assert (channel.high_water, channel.nbytes) == (100, 50)


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="max_bytes is 0"):
        Channel("test", max_bytes=0)


def test_nothing_is_lost_or_doubled_between_many_threads() -> None:
    channel: Channel[int] = Channel("test", max_bytes=64, max_items=5)
    taken: list[int] = []

    def produce(start: int) -> None:
        for number in range(start, start + 250):
            channel.put(number, number % 90 + 1, timeout=SOON_S)

    def consume() -> list[int]:
        mine = []
        while True:
            try:
                mine.append(channel.get(timeout=SOON_S))
            except ChannelClosedError:
                return mine

    with ThreadPoolExecutor(8) as threads:
        consumers = [threads.submit(consume) for _ in range(4)]
        producers = [threads.submit(produce, 250 * n) for n in range(4)]
        for producer in producers:
            producer.result()
        channel.close()
        for consumer in consumers:
            taken += consumer.result()
    assert sorted(taken) == list(range(1000))
    assert channel.high_water <= 90
    assert channel.nbytes == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 150) | st.none(), max_size=60))
def test_the_bound_holds_whatever_is_put_and_taken(moves: list[int | None]) -> None:
    channel: Channel[int] = Channel("test", max_bytes=100, max_items=4)
    held: list[int] = []
    for size in moves:
        if size is None:
            if held:
                assert channel.get(timeout=0) == held.pop(0)
            continue
        fits = not held or (len(held) < 4 and sum(held) + size <= 100)
        try:
            channel.put(size, size, timeout=0)
        except ChannelTimeoutError:
            assert not fits
        else:
            assert fits
            held.append(size)
        assert channel.nbytes == sum(held)
        assert 0.0 <= channel.occupancy <= 1.0
