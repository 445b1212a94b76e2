import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.loader.plan import Plan, best_fit, deal, in_buckets, in_fixed_numbers, in_packs
from trainer.randomness import order, stream

KEY = stream(3, "batches")
BUDGET = 100
lengths_of = st.lists(st.integers(1, BUDGET), min_size=1, max_size=300).map(
    lambda lengths: np.array(lengths, dtype=np.int32)
)


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    """Lengths of a text corpus: median 726, from 16 to 8192."""
    drawn = np.random.default_rng(seed).normal(np.log(726), 0.8, count)
    return np.clip(np.exp(drawn), 16, 8192).astype(np.int32)


def batches(plan: Plan) -> list[np.ndarray]:
    return [plan.rows[a:b] for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]


@given(lengths_of, st.integers(1, 50), st.integers(1, 16))
def test_bucketed_batches_hold_every_row_once_and_stay_within_the_budget(lengths, window, multiple):
    rows = np.arange(len(lengths))
    plan = in_buckets(rows, lengths, budget=BUDGET, window=window, multiple=multiple, key=KEY)
    assert sorted(plan.rows) == list(rows)
    for batch in batches(plan):
        width = min(-(-lengths[batch].max() // multiple) * multiple, BUDGET)
        assert len(batch) >= 1
        assert len(batch) * width <= BUDGET


@given(lengths_of)
def test_packs_hold_every_row_once_and_stay_within_the_budget(lengths):
    plan = in_packs(np.arange(len(lengths)), lengths, budget=BUDGET, key=KEY)
    assert sorted(plan.rows) == list(range(len(lengths)))
    assert all(1 <= lengths[batch].sum() <= BUDGET for batch in batches(plan))


@given(lengths_of)
def test_a_row_opens_a_new_pack_only_when_it_fits_into_none(lengths):
    packs = best_fit(lengths, BUDGET)
    room: dict[int, int] = {}
    for length, pack in zip(lengths.tolist(), packs.tolist(), strict=True):
        fitting = [left for left in room.values() if left >= length]
        assert room.get(pack, BUDGET) == (min(fitting) if fitting else BUDGET)
        assert (pack in room) == bool(fitting)
        room[pack] = room.get(pack, BUDGET) - length


def test_no_rows_make_no_batches():
    none, lengths = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    assert len(in_buckets(none, lengths, budget=9, window=4, multiple=1, key=KEY)) == 0
    assert len(in_packs(none, lengths, budget=9, key=KEY)) == 0
    assert len(in_fixed_numbers(none, 4)) == 0


def test_fixed_batches_are_cut_in_order_and_the_last_may_hold_less():
    plan = in_fixed_numbers(np.arange(10), 4)
    assert [list(batch) for batch in batches(plan)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_most_of_the_budget_is_tokens():
    lengths = lognormal(100_000)
    rows = order(stream(0, "order"), np.arange(len(lengths), dtype=np.uint64))
    bucketed = in_buckets(rows, lengths[rows], budget=65_536, window=16_384, multiple=1, key=KEY)
    assert lengths.sum() / (len(bucketed) * 65_536) >= 0.97
    for budget in (8192, 65_536):
        packed = in_packs(rows, lengths[rows], budget=budget, key=KEY)
        assert lengths.sum() / (len(packed) * budget) >= 0.995


def test_the_length_of_a_batch_does_not_follow_its_place():
    """Without the shuffle of batches each window is a ramp, and the loss a saw."""
    lengths = lognormal(100_000)
    rows = order(stream(0, "order"), np.arange(len(lengths), dtype=np.uint64))
    plan = in_buckets(rows, lengths[rows], budget=65_536, window=16_384, multiple=1, key=KEY)
    longest = np.maximum.reduceat(lengths[plan.rows], plan.bounds[:-1]).astype(float)
    for lag in (1, 2, 8):  # of neighbours, and so of any ramp
        assert abs(np.corrcoef(longest[:-lag], longest[lag:])[0, 1]) < 4 / np.sqrt(len(longest))
    place = np.arange(len(longest))
    assert abs(np.corrcoef(place, longest)[0, 1]) < 4 / np.sqrt(len(longest))


def test_another_key_gives_other_batches_in_another_order():
    lengths = lognormal(2000)
    rows = np.arange(len(lengths))

    def made(key: np.uint64) -> list[int]:
        return list(in_packs(rows, lengths, budget=8192, key=key).rows)

    assert made(KEY) == made(KEY)
    assert made(KEY) != made(stream(3, "batches", 1))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 7),
    st.data(),
)
def test_ranks_get_equal_numbers_of_parts_that_hold_every_row_once(sizes, world_size, data):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    offset = data.draw(st.integers(0, int(bounds[-1]) - 1))
    batches = np.sum(bounds > offset)
    if bounds[-1] - offset < -(-batches // world_size) * world_size:
        with pytest.raises(UsageError, match="do not go round"):
            deal(bounds, world_size, offset=offset)
        return
    parts = deal(bounds, world_size, offset=offset)
    assert (len(parts) - 1) % world_size == 0
    assert parts[0] == offset
    assert parts[-1] == bounds[-1]
    assert (np.diff(parts) >= 1).all()
    assert set(bounds[bounds > offset]) <= set(parts)  # a part never reaches over two batches
    assert len(parts) - 1 < batches + world_size


def test_batches_that_go_round_are_dealt_as_they_are():
    bounds = np.array([0, 4, 8, 12, 16])
    assert list(deal(bounds, 2)) == list(bounds)


def test_the_last_batches_are_split_or_dropped_where_they_do_not_go_round():
    bounds = np.array([0, 4, 8, 12])
    assert list(deal(bounds, 2)) == [0, 4, 8, 10, 12]
    assert list(deal(bounds, 2, drop_last=True)) == [0, 4, 8]


def test_a_position_that_was_dealt_before_is_dealt_to_other_ranks_in_the_same_order():
    bounds = np.array([0, 4, 8, 12, 16, 20])
    two = deal(bounds, 2)
    rest = deal(bounds, 3, offset=int(two[2]))
    assert rest[0] == two[2]
    assert list(rest) == [8, 12, 16, 20]
