import numpy as np
import pytest

from protocol.errors import DataError
from trainer.bench import ours
from trainer.bench.batches import pad
from trainer.bench.contestant import Contestant, Order, Part
from trainer.bench.corpus import views
from trainer.bench.race import Pace, race, segment, verify
from trainer.loader import open_rows

PACE = Pace(rounds=2, most=4, seconds=60.0, least=1, warm=2)


@pytest.fixture(scope="module")
def plan(work):
    return ours.plan_batches(open_rows(work.corpus.shards))


def contestant(work, *, name="it", order=Order.PLAN, change=lambda batches: batches, closed=None):
    rows = list(views(work.corpus))

    def start(plan):
        try:
            yield from change(pad([rows[row] for row in batch]) for batch in plan)
        finally:
            if closed is not None:
                closed.append(name)

    return Contestant(name=name, part=Part.PEER, start=start, order=order)


def silent(text):
    pass


def test_everybody_is_timed_once_a_round_and_closed_each_time(work, plan):
    closed: list[str] = []
    both = [contestant(work, name=name, closed=closed) for name in "ab"]
    standings = race(both, work.corpus, plan, PACE, silent)
    assert {title: len(turns) for title, turns in standings.turns.items()} == {
        "peer: a": 2,
        "peer: b": 2,
    }
    assert min(min(turns) for turns in standings.turns.values()) > 0
    assert sorted(closed) == ["a"] * 3 + ["b"] * 3  # to verify, and two rounds
    assert standings.fallen == {}


def test_the_floor_and_ours_run_and_yield_the_plan(work, plan):
    contestants = ours.contestants(work)
    assert [c.part for c in contestants] == [Part.FLOOR, *[Part.OURS] * (len(contestants) - 1)]
    standings = race(contestants, work.corpus, plan, PACE, silent)
    assert standings.fallen == {}
    assert set(standings.turns) == {c.title for c in contestants}


def test_a_contestant_that_yields_something_else_ends_the_race(work, plan):
    def spoilt(batches):
        for batch in batches:
            batch.ids[0, 1] += 1
            yield batch

    with pytest.raises(DataError, match="peer: liar"):
        race([contestant(work, name="liar", change=spoilt)], work.corpus, plan, PACE, silent)


def test_a_contestant_that_fails_falls_out_and_the_others_go_on(work, plan):
    def failing(batches):
        yield next(batches)
        raise RuntimeError("no memory\nand more")

    heard: list[str] = []
    both = [contestant(work, name="a", change=failing), contestant(work, name="b")]
    standings = race(both, work.corpus, plan, PACE, heard.append)
    assert standings.fallen == {"peer: a": "RuntimeError: no memory"}
    assert list(standings.turns) == ["peer: b"]
    assert any("peer: a fell out" in text for text in heard)


def backwards(batches):
    yield from reversed(list(batches))


def twice(batches):
    for batch in batches:
        yield batch
        yield batch


@pytest.mark.parametrize("order", Order)
def test_batches_come_in_the_order_that_is_promised(work, plan, order):
    turned = contestant(work, order=order, change=backwards)
    if order is Order.PLAN:
        with pytest.raises(DataError, match="not those of the plan"):
            verify(turned, work.corpus, plan, 3)
    else:
        verify(turned, work.corpus, plan, 3)


def test_a_row_that_comes_twice_is_refused(work, plan):
    with pytest.raises(DataError, match="a row comes twice"):
        verify(contestant(work, order=Order.OWN, change=twice), work.corpus, plan, 3)


def test_each_round_has_the_batches_after_those_of_the_last_one():
    plan = [np.array([row]) for row in range(5)]
    found = [[int(rows[0]) for rows in segment(plan, round_, 3)] for round_ in range(3)]
    assert found == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_that_batches_are_a_contestants_own_is_said_in_its_title(work):
    assert contestant(work, order=Order.OWN).title == "peer: it, in its own order"
    assert contestant(work).title == "peer: it"
