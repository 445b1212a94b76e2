"""Tests of trainer/data.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protocol.errors import DataError, UsageError
from trainer.data import ClipSource, Part, learning_parts, split_indices
from trainer.pool.format import Pool
from trainer.pool.sample import sample, write_index

ROWS = np.arange(100, 170)


def source(pool: Pool, *, seed: int = 1, batch_size: int = 16) -> ClipSource:
    return ClipSource(pool, ROWS, batch_size=batch_size, epochs=3, seed=seed)


def seen(source: ClipSource) -> list[tuple[int, int, list[int], bool]]:
    return [(i.seq, i.epoch, i.payload.rows.tolist(), i.last) for i in source]


def test_parts_share_no_clip_and_leave_none_out(pool: Pool) -> None:
    parts = [split_indices(pool, part) for part in Part]
    assert sorted(np.concatenate(parts).tolist()) == list(range(pool.rows))
    train, validation, test = parts
    assert (pool.split[test] == "test").all()
    assert (pool.split[np.concatenate([train, validation])] == "train").all()
    assert 0.1 < len(validation) / (len(train) + len(validation)) < 0.3


def test_the_parts_to_learn_from_are_those_of_the_sample(pool: Pool, tmp_path: Path) -> None:
    index = sample(pool, 800, 1)
    write_index(tmp_path / "index.json", index)
    parts = learning_parts(pool, index=tmp_path / "index.json", validation_share=0.3)
    assert list(parts) == [Part.TRAIN, Part.VALIDATION]
    for part, rows in parts.items():
        same = split_indices(pool, part, index=index, validation_share=0.3)
        assert rows.tolist() == same.tolist()


def test_an_index_restricts_what_is_learnt_from_and_not_what_is_held_out(pool: Pool) -> None:
    index = sample(pool, 800, 1)
    chosen = set(index.rows.tolist())
    for part in (Part.TRAIN, Part.VALIDATION):
        whole = set(split_indices(pool, part).tolist())
        assert set(split_indices(pool, part, index=index).tolist()) == whole & chosen
    held_out = split_indices(pool, Part.TEST)
    assert split_indices(pool, Part.TEST, index=index).tolist() == held_out.tolist()


def test_a_larger_validation_share_keeps_what_a_smaller_one_chose(pool: Pool) -> None:
    small, large = (
        set(split_indices(pool, Part.VALIDATION, validation_share=share).tolist())
        for share in (0.1, 0.4)
    )
    assert small < large


def test_a_part_without_clips_is_refused(pool: Pool) -> None:
    with pytest.raises(UsageError, match=r"choose the validation clips.*there are none"):
        split_indices(pool, Part.VALIDATION, validation_share=0.0)


def test_every_epoch_visits_every_clip_once_in_an_order_of_its_own(pool: Pool) -> None:
    items = seen(source(pool))
    epochs = [[row for _, e, rows, _ in items if e == epoch for row in rows] for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows) == ROWS.tolist()
    assert len({tuple(rows) for rows in epochs}) == 3
    assert [seq for seq, *_ in items] == list(range(15))
    assert [len(rows) for _, e, rows, _ in items if e == 0] == [16, 16, 16, 16, 6]
    assert [last for *_, last in items] == [False, False, False, False, True] * 3


def test_an_item_holds_the_clips_it_names(pool: Pool) -> None:
    item = next(iter(source(pool)))
    assert (item.payload.clips == pool.clips(item.payload.rows)).all()
    assert item.sample_ids == pool.clip_id[item.payload.rows].tolist()
    assert item.nbytes == 16 * 128 * 4
    assert (item.payload.keys == pool.keys[item.payload.rows]).all()


def test_the_order_follows_from_the_seed_alone(pool: Pool) -> None:
    assert seen(source(pool)) == seen(source(pool))
    assert seen(source(pool)) != seen(source(pool, seed=2))
    rows = [row for _, _, part, _ in seen(source(pool)) for row in part]
    assert rows == [row for _, _, part, _ in seen(source(pool, batch_size=7)) for row in part]


@pytest.mark.parametrize("consumed", [0, 3, 5, 7, 15])
def test_a_position_resumes_in_the_middle_of_an_epoch(pool: Pool, consumed: int) -> None:
    whole = source(pool)
    iterator = iter(whole)
    for _ in range(min(consumed + 2, 15)):  # read ahead of what was consumed
        next(iterator)
    resumed = source(pool)
    resumed.load_state_dict(whole.state_dict(consumed))
    assert seen(resumed) == seen(source(pool))[consumed:]


def test_a_position_in_other_data_is_refused(pool: Pool) -> None:
    state = source(pool).state_dict(3)
    other = ClipSource(pool, ROWS[1:], batch_size=16, epochs=3, seed=2)
    with pytest.raises(DataError, match="another rows, seed"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="another pool"):
        source(pool).load_state_dict({**state, "pool": "0" * 64})


def test_settings_that_load_nothing_are_refused(pool: Pool) -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        ClipSource(pool, ROWS, batch_size=0, epochs=1, seed=0)
    with pytest.raises(UsageError, match="rows is 0"):
        ClipSource(pool, ROWS[:0], batch_size=1, epochs=1, seed=0)
