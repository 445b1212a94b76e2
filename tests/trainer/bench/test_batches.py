from itertools import pairwise

import numpy as np
import pytest

from protocol.errors import DataError
from trainer.bench.batches import Batch, as_they_come, check, pad
from trainer.bench.corpus import views


def test_a_padded_batch_is_as_wide_as_its_longest_row_and_zero_behind_the_others():
    rows = [(np.array([7, 8], np.int32), np.array([1, 1], np.int8))]
    rows += [(np.array([9, 9, 9], np.int32), np.array([0, 1, 1], np.int8))]
    batch = pad(rows)
    assert batch.ids.tolist() == [[7, 8, 0], [9, 9, 9]]
    assert batch.mask.tolist() == [[1, 1, 0], [0, 1, 1]]


def test_rows_are_batched_as_they_come_and_never_over_the_budget(work):
    budget = 10_000
    batches = list(as_they_come(views(work.corpus), budget=budget))
    assert [int(number) for batch in batches for number in batch.ids[:, 0]] == list(range(400))
    assert max(batch.ids.size for batch in batches) <= budget
    # Each is full: with the next row it would be over the budget.
    for batch, after in pairwise(batches):
        longest = max(batch.ids.shape[1], int(work.corpus.lengths[after.ids[0, 0]]))
        assert (len(batch.ids) + 1) * longest > budget


def test_a_right_batch_passes_in_any_order(work):
    rows = list(views(work.corpus))
    assert check(pad([rows[5], rows[2]]), work.corpus, who="x").tolist() == [5, 2]


def _batch(work) -> Batch:
    return pad(list(views(work.corpus))[:4])


def _value(batch):
    batch.ids[1, 3] += 1


def _padding(batch):
    batch.mask[int(np.argmin(batch.ids.astype(bool).sum(axis=1))), -1] = 1


def _number(batch):
    batch.ids[2, 0] = 10_000_000


@pytest.mark.parametrize(
    ("damage", "why"),
    [(_value, "row 1 is not"), (_padding, "is not the corpus"), (_number, "begin with its number")],
)
def test_a_batch_with_another_value_is_refused(work, damage, why):
    batch = _batch(work)
    damage(batch)
    with pytest.raises(DataError, match=f"somebody yields: .*{why}"):
        check(batch, work.corpus, who="somebody")


def test_a_batch_over_the_budget_or_of_other_types_is_refused(work):
    batch = _batch(work)
    with pytest.raises(DataError, match="the budget is 100 slots"):
        check(batch, work.corpus, who="x", budget=100)
    with pytest.raises(DataError, match="int64"):
        check(Batch(batch.ids.astype(np.int64), batch.mask), work.corpus, who="x")
    with pytest.raises(DataError, match="shape"):
        check(Batch(batch.ids, batch.mask[:, 1:]), work.corpus, who="x")
