"""Several calls at a time: their results in order, no more at a time than there may be."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from waiting import eventually

from syncd.delivery.ahead import ahead


def test_results_come_in_order_whatever_ends_first():
    later = threading.Event()

    def call(number):
        if number == 0:
            assert later.wait(30)
        else:
            later.set()
        return number

    assert list(ahead(call, range(10), most=3)) == list(range(10))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_calls_go_on_than_may_and_no_item_is_drawn_before_there_is_room(most):
    lock, going, drawn, most_seen = threading.Lock(), set(), [], []

    def items():
        for number in range(20):
            drawn.append(number)
            yield number

    def call(number):
        with lock:
            going.add(number)
            most_seen.append(len(going))
        with lock:
            going.discard(number)
        return number

    for done in ahead(call, items(), most=most):
        assert len(drawn) <= done + most + 1
    assert max(most_seen) <= most


def test_calls_do_go_on_side_by_side():
    together = threading.Barrier(3, timeout=30)
    assert len(list(ahead(lambda item: together.wait(), range(3), most=3))) == 3


@pytest.mark.parametrize(("items", "most"), [([7], 4), ([], 4), ([7, 8], 1)])
def test_a_single_call_at_a_time_needs_no_thread(items, most):
    threads = list(ahead(lambda item: threading.current_thread(), items, most=most))
    assert threads == [threading.current_thread()] * len(items)


def test_an_error_is_raised_in_its_turn_and_nothing_goes_on_after_it():
    begun = []

    def call(number):
        begun.append(number)
        if number == 2:
            raise OSError("number 2")
        return number

    results = ahead(call, range(1000), most=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="number 2"):
        next(results)
    count = len(begun)
    assert count < 10
    assert threading.active_count() == 1 or not any(
        thread.name.startswith("ahead") for thread in threading.enumerate()
    )


def test_a_caller_that_wants_no_more_leaves_no_thread_behind():
    with closing(ahead(lambda item: item, iter(int, 1), most=3)) as results:
        assert next(results) == 0
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("ahead")])
