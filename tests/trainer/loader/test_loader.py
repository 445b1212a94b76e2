"""The loader, over real files."""

import gc
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from waiting import eventually

from protocol.errors import DataError, UsageError
from trainer.engine.stage import StageError
from trainer.loader import (
    Batch,
    ByGroup,
    Fixed,
    InOrder,
    Kernel,
    Loader,
    Packed,
    Padded,
    Rows,
    Shuffled,
    TooLong,
    open_rows,
)

COUNT = 300
BUDGET = 512


def ids_of(row: int) -> list[int]:
    """The tokens of a row: they tell which it is, and how long it is."""
    length = row * 37 % 120
    return [row * 1000 + place for place in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of token rows, a mask beside them and a label; every 120th row is empty."""
    made = tmp_path_factory.mktemp("tokens")
    for shard, numbers in enumerate(np.array_split(np.arange(COUNT), 3)):
        ids = [ids_of(int(row)) for row in numbers]
        table = pa.table(
            {
                "ids": pa.array(ids, pa.list_(pa.int32())),
                "mask": pa.array([[i % 3 for i in row] for row in ids], pa.list_(pa.int8())),
                "label": pa.array([int(row) for row in numbers], pa.int64()),
            }
        )
        path = str(made / f"shard-{shard}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    return made


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return open_rows(folder)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    path = tmp_path_factory.mktemp("clips") / "clips.arrow"
    values = np.arange(50 * 12, dtype=np.float32)
    table = pa.table({"clip": pa.FixedSizeListArray.from_arrays(pa.array(values), 12)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return open_rows(path)


BATCHINGS = [
    Padded(budget=BUDGET, window=64),
    Padded(budget=BUDGET, window=1000, multiple=8),
    Packed(budget=BUDGET),
    Packed(budget=BUDGET, full=True),
]
each_batching = pytest.mark.parametrize("batching", BATCHINGS, ids=str)


def documents(batch: Batch, name: str) -> list[list[int]]:
    """The values of each row, as they stand in a batch."""
    values = batch[name]
    if not len(batch.boundaries):
        lengths = batch.lengths.tolist()
        return [line[:n].tolist() for line, n in zip(values, lengths, strict=True)]
    bounds = batch.boundaries.tolist()
    return [values[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def order_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


# What a batch is


@each_batching
@pytest.mark.parametrize("kernel", [Kernel.NUMPY, Kernel.NUMBA])
def test_every_row_comes_once_and_is_what_stands_in_the_file(rows, batching, kernel):
    seen: list[int] = []
    for batch in Loader(rows, batching, seed=1, kernel=kernel):
        for row, ids, mask in zip(
            batch.rows.tolist(), documents(batch, "ids"), documents(batch, "mask"), strict=True
        ):
            assert ids == ids_of(row)
            assert mask == [i % 3 for i in ids]
        assert batch["label"].tolist() == batch.rows.tolist()
        assert batch.tokens == sum(batch.lengths.tolist()) <= BUDGET
        assert batch.longest == max(batch.lengths.tolist())
        seen += batch.rows.tolist()
    assert sorted(seen) == [row for row in range(COUNT) if ids_of(row)]


@each_batching
def test_what_is_behind_a_row_is_zero(rows, batching):
    for batch in Loader(rows, batching):
        total = sum(sum(ids_of(row)) for row in batch.rows.tolist())
        assert int(batch["ids"].sum(dtype=torch.int64)) == total


def test_a_padded_batch_is_as_wide_as_its_longest_row_rounded_up(rows):
    for batch in Loader(rows, Padded(budget=BUDGET, multiple=16)):
        assert batch["ids"].shape == (len(batch.rows), -(-batch.longest // 16) * 16)
        assert batch["ids"].shape == batch["mask"].shape
        assert batch["ids"].numel() <= BUDGET


def test_a_packed_batch_has_the_shape_of_the_budget_if_that_is_wanted(rows):
    assert {tuple(b["ids"].shape) for b in Loader(rows, Packed(budget=BUDGET, full=True))} == {
        (BUDGET,)
    }
    assert all(b["ids"].shape == (b.tokens,) for b in Loader(rows, Packed(budget=BUDGET)))
    batch = next(iter(Loader(rows, Packed(budget=BUDGET))))
    assert batch.boundaries.dtype == torch.int32
    assert batch.boundaries[0] == 0
    assert batch.boundaries[-1] == batch.tokens


def test_clips_come_in_their_shape_and_the_last_batch_holds_the_rest(clips):
    batches = list(Loader(clips, Fixed(size=16), seed=2))
    assert [tuple(batch["clip"].shape) for batch in batches] == [(16, 12)] * 3 + [(2, 12)]
    for batch in batches:
        first = torch.from_numpy(batch.rows * 12).to(torch.float32)
        assert (batch["clip"] == first[:, None] + torch.arange(12)).all()


def test_a_column_is_converted_where_that_is_wanted(rows):
    batch = next(iter(Loader(rows, Padded(budget=BUDGET), dtypes={"ids": torch.int64})))
    assert batch["ids"].dtype == torch.int64
    assert batch["mask"].dtype == torch.int8
    assert documents(batch, "ids") == [ids_of(row) for row in batch.rows.tolist()]


def test_batches_that_are_kept_stay_as_they_are(rows):
    batches = list(Loader(rows, Padded(budget=BUDGET), prefetch_bytes=1))
    for batch in batches:
        assert documents(batch, "ids") == [ids_of(row) for row in batch.rows.tolist()]


def test_a_batch_moves_to_a_device_with_all_that_it_has(rows):
    batch = next(iter(Loader(rows, Packed(budget=BUDGET))))
    moved = batch.to("meta")
    assert {
        tensor.device.type for tensor in (*moved.values(), moved.boundaries, moved.lengths)
    } == {"meta"}
    assert moved.rows is batch.rows


# Rows that are too long


def test_a_row_that_is_too_long_is_an_error_that_says_where_it_is(rows):
    with pytest.raises(DataError, match=r"shard-\d.arrow, row \d+ has 1\d\d values, and 100 are"):
        next(iter(Loader(rows, Padded(budget=100))))


def test_rows_that_are_too_long_are_skipped_or_cut_and_counted(rows):
    long = [row for row in range(COUNT) if len(ids_of(row)) > 100]
    empty = sum(1 for row in range(COUNT) if not ids_of(row))
    loader = Loader(rows, Padded(budget=BUDGET, longest=100, too_long=TooLong.SKIP))
    seen = {row for batch in loader for row in batch.rows.tolist()}
    assert not seen & set(long)
    assert loader.left_out == {"skipped": len(long), "empty": empty}
    loader = Loader(rows, Packed(budget=BUDGET, longest=100, too_long=TooLong.TRUNCATE))
    for batch in loader:
        assert documents(batch, "ids") == [ids_of(row)[:100] for row in batch.rows.tolist()]
    assert loader.left_out == {"truncated": len(long), "empty": empty}


# Order, ranks and positions


@each_batching
def test_the_order_is_the_same_whatever_the_number_of_threads(rows, batching):
    orders = [
        order_of(list(Loader(rows, batching, seed=5, threads=threads, prefetch_bytes=room)))
        for threads, room in ((0, 1), (1, 1), (2, 10_000), (5, 1 << 20))
    ]
    assert all(order == orders[0] for order in orders)


def test_epochs_follow_one_another_and_each_has_its_order(rows):
    loader = Loader(rows, Padded(budget=BUDGET), seed=5)
    first, second = order_of(list(loader)), order_of(list(loader))
    assert first != second
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert order_of(list(loader)) == second
    fresh = Loader(rows, Padded(budget=BUDGET), seed=5)
    fresh.set_epoch(1)
    assert order_of(list(fresh)) == second
    assert order_of(list(Loader(rows, Padded(budget=BUDGET), seed=6))) != first


def test_its_length_is_how_many_batches_come(rows):
    for rank in range(3):
        loader = Loader(rows, Padded(budget=BUDGET), rank=rank, world_size=3)
        assert len(loader) == len(list(loader))


@each_batching
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_have_equal_numbers_of_steps_and_no_row_in_common(rows, batching, world_size):
    parts = [
        list(Loader(rows, batching, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = [row for part in parts for batch in part for row in batch.rows.tolist()]
    assert sorted(seen) == [row for row in range(COUNT) if ids_of(row)]


def test_the_last_batches_are_dropped_only_where_that_is_wanted(clips):
    parts = [
        list(Loader(clips, Fixed(size=16), rank=rank, world_size=3, drop_last=True))
        for rank in range(3)
    ]
    assert [len(part) for part in parts] == [1, 1, 1]


@each_batching
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_position_is_loaded_those_batches_come_that_would_have_come(
    rows, batching, world_size
):
    whole = Loader(rows, batching, seed=3, rank=world_size - 1, world_size=world_size)
    whole.set_epoch(2)
    wanted = order_of(list(whole))
    for stop in range(0, len(wanted) + 1, 3):
        first = Loader(rows, batching, seed=3, rank=0, world_size=world_size, threads=3)
        first.set_epoch(2)
        begun = iter(first)
        for _ in range(stop):
            next(begun)
        state = pickle.loads(pickle.dumps(first.state_dict()))
        begun.close()
        resumed = Loader(
            rows, batching, seed=3, rank=world_size - 1, world_size=world_size, threads=1
        )
        resumed.load_state_dict(state)
        assert resumed.epoch == 2
        rest = list(resumed)
        assert order_of(rest) == wanted[stop:]
        assert [batch.step for batch in rest] == list(range(stop, len(wanted)))


@each_batching
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 5)])
def test_with_another_number_of_ranks_the_rows_come_in_the_same_order(
    rows, batching, before, after
):
    def steps(loaders: list[Loader]) -> list[list[int]]:
        """The rows of each step, of all ranks one after another."""
        together = zip(*(list(loader) for loader in loaders), strict=True)
        return [[row for batch in step for row in batch.rows.tolist()] for step in together]

    def ranks(count: int) -> list[Loader]:
        return [Loader(rows, batching, seed=3, rank=r, world_size=count) for r in range(count)]

    wanted = [row for step in steps(ranks(1)) for row in step]
    for stop in range(0, len(ranks(before)[0]), 2):
        first = ranks(before)[0]
        begun = iter(first)
        for _ in range(stop):
            next(begun)
        state = first.state_dict()
        begun.close()
        done = [row for step in steps(ranks(before))[:stop] for row in step]
        resumed = ranks(after)
        for loader in resumed:
            loader.load_state_dict(state)
        rest = [row for step in steps(resumed) for row in step]
        assert done + rest == wanted


def test_a_position_can_be_taken_after_the_number_of_ranks_has_changed(rows):
    one = Loader(rows, Padded(budget=BUDGET), seed=3, rank=0, world_size=1)
    begun = iter(one)
    for _ in range(3):
        next(begun)
    two = [Loader(rows, Padded(budget=BUDGET), seed=3, rank=r, world_size=2) for r in range(2)]
    for loader in two:
        loader.load_state_dict(one.state_dict())
    begun = iter(two[0])
    next(begun)
    state = two[0].state_dict()
    again = Loader(rows, Padded(budget=BUDGET), seed=3, rank=0, world_size=2)
    again.load_state_dict(state)
    assert order_of(list(again)) == order_of(list(begun))


def test_an_epoch_that_was_broken_off_begins_anew(rows):
    loader = Loader(rows, Padded(budget=BUDGET), seed=3)
    wanted = order_of(list(Loader(rows, Padded(budget=BUDGET), seed=3)))
    for _ in loader:
        break
    assert order_of(list(loader)) == wanted


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (lambda rows, clips: Loader(rows, Padded(budget=BUDGET), seed=1), "batches, order"),
        (lambda rows, clips: Loader(rows, Padded(budget=300)), "batches"),
        (lambda rows, clips: Loader(rows, Packed(budget=BUDGET)), "batches"),
        (lambda rows, clips: Loader(rows, Padded(budget=BUDGET), drop_last=True), "drop_last"),
        (
            lambda rows, clips: Loader(rows, Padded(budget=BUDGET), sampler=InOrder(count=COUNT)),
            "order",
        ),
        (lambda rows, clips: Loader(clips, Fixed(size=2)), "batches, columns, order, source"),
    ],
)
def test_a_position_in_other_data_or_another_order_is_refused(rows, clips, other, differing):
    state = Loader(rows, Padded(budget=BUDGET)).state_dict()
    with pytest.raises(DataError, match=f"another {differing}"):
        other(rows, clips).load_state_dict(state)
    with pytest.raises(DataError, match="version is 9"):
        Loader(rows, Padded(budget=BUDGET)).load_state_dict(state | {"version": 9})


def test_a_sampler_says_which_rows_there_are(rows):
    sampler = Shuffled(COUNT, seed=1, size=60)
    seen = [
        r for b in Loader(rows, Padded(budget=BUDGET), sampler=sampler) for r in b.rows.tolist()
    ]
    assert sorted(seen) == sorted(row for row in sampler.rows(0).tolist() if ids_of(row))
    groups = np.where(np.arange(COUNT) % 10 == 1, "rare", "common")
    weighted = ByGroup(groups, size=200, seed=1, weights={"rare": 1, "common": 1})
    drawn = np.concatenate([b.rows for b in Loader(rows, Padded(budget=BUDGET), sampler=weighted)])
    assert abs(np.mean(groups[drawn] == "rare") - 0.5) < 0.05


# Threads


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def test_no_thread_outlives_an_epoch_or_one_that_was_broken_off(rows):
    loader = Loader(rows, Padded(budget=BUDGET), threads=3, prefetch_bytes=1)
    list(loader)
    assert not loader_threads()
    begun = iter(loader)
    next(begun)
    assert loader_threads()
    loader.close()
    assert not loader_threads()
    for _ in loader:
        break
    gc.collect()
    assert not loader_threads()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_iteration_that_was_closed_is_not_taken_for_one_that_has_ended(rows, threads):
    loader = Loader(rows, Padded(budget=BUDGET), threads=threads)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(UsageError, match="closed, or iterated anew"):
        next(first)
    assert len(list(second)) == len(loader) - 1


def test_a_failure_in_a_thread_reaches_the_caller_in_its_turn_with_shard_and_row(rows):
    wanted = order_of(list(Loader(rows, Padded(budget=BUDGET), threads=0)))

    def broken(batch: Batch) -> Batch:
        if batch.step == 4:
            raise ZeroDivisionError("as asked")
        return batch

    loader = Loader(rows, Padded(budget=BUDGET), threads=4, transform=broken)
    begun = iter(loader)
    assert order_of([next(begun) for _ in range(4)]) == wanted[:4]
    where = rows.where(wanted[4][0])
    with pytest.raises(StageError, match=f"'loader' failed on item 4 .*{where}") as raised:
        next(begun)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert not loader_threads()


def test_what_a_transform_returns_is_what_comes(rows):
    loader = Loader(rows, Padded(budget=BUDGET), transform=lambda batch: batch.tokens)
    assert sum(loader) == sum(len(ids_of(row)) for row in range(COUNT))


def test_no_more_is_read_ahead_than_there_is_room_for(rows):
    made: list[int] = []

    def noted(batch: Batch) -> Batch:
        made.append(batch.step)
        return batch

    batching = Padded(budget=BUDGET)
    largest = max(batch.nbytes for batch in Loader(rows, batching))
    loader = Loader(rows, batching, threads=2, prefetch_bytes=3 * largest, transform=noted)
    for taken, _ in enumerate(loader, start=1):
        wanted = min(taken + 3, len(loader))
        eventually(lambda wanted=wanted: len(made) >= wanted)
        # In the channel smaller ones may be more; and each thread has one in hand.
        assert len(made) <= taken + 3 + 2 + 2


def test_it_says_which_side_waits(rows):
    loader = Loader(rows, Padded(budget=BUDGET), threads=1)
    assert loader.metrics.report()["bottleneck"] == "none"
    list(loader)
    report = loader.metrics.report()
    assert report["batches"] == len(loader)
    assert report["tokens"] == sum(len(ids_of(row)) for row in range(COUNT))
    assert 0 < report["padding"] < 1
    assert report["busy_s"] > 0


# Processes


def test_a_process_that_was_forked_begins_anew_and_may_not_go_on(rows):
    """In a process of its own, since pytest's has threads."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from protocol.errors import UsageError\n"
        "from trainer.loader import Loader, Padded, open_rows\n"
        f"loader = Loader(open_rows(Path(sys.argv[1])), Padded(budget={BUDGET}))\n"
        "begun = iter(loader)\n"
        "next(begun)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        next(begun)\n"
        "    except UsageError as error:\n"
        "        refused = 'another process' in str(error)\n"
        "    os._exit(0 if refused and len(list(loader)) == len(loader) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(len(list(begun)) + 1 == len(loader))\n"
    )
    command = [sys.executable, "-c", script, str(rows._shards[0].path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_it_is_opened_again_in_a_process_that_is_spawned(rows):
    loader = Loader(rows, Padded(budget=BUDGET), seed=4)
    copied = pickle.loads(pickle.dumps(loader))
    assert order_of(list(copied)) == order_of(list(loader))


def test_an_interpreter_that_ends_in_mid_epoch_ends_at_once(folder):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trainer.loader import Loader, Padded, open_rows\n"
        "rows = open_rows(Path(sys.argv[1]))\n"
        f"loader = Loader(rows, Padded(budget={BUDGET}), prefetch_bytes=1)\n"
        "begun = iter(loader)\n"
        "next(begun)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda rows, clips: Loader(rows, Fixed(size=4)), "differ in length in the column 'ids'"),
        (lambda rows, clips: Loader(clips, Padded()), "no column has rows that differ"),
        (lambda rows, clips: Loader(rows, Padded(), threads=-1), "threads is -1"),
        (lambda rows, clips: Loader(rows, Padded(), prefetch_bytes=0), "prefetch_bytes is 0"),
        (lambda rows, clips: Loader(rows, Padded(), rank=2, world_size=2), "rank is 2"),
        (lambda rows, clips: Loader(rows, Padded(), rank=1), "go together"),
        (lambda rows, clips: Loader(rows, Padded(), dtypes={"id": torch.int64}), "column 'id'"),
        (lambda rows, clips: Loader(rows, Padded()).set_epoch(-1), "epoch is -1"),
        (lambda rows, clips: Padded(budget=0), "budget is 0"),
        (lambda rows, clips: Padded(budget=8, multiple=9), "multiple is 9"),
        (lambda rows, clips: Packed(budget=8, longest=9), "longest is 9"),
        (lambda rows, clips: Fixed(size=0), "size is 0"),
        (
            lambda rows, clips: len(Loader(clips, Fixed(size=4), rank=0, world_size=51)),
            "50 rows do not go round 51 ranks",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused(rows, clips, make: Callable[..., Any], why: str):
    with pytest.raises(UsageError, match=why):
        make(rows, clips)


def test_the_rank_comes_from_the_environment_as_torchrun_sets_it(rows, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = Loader(rows, Padded(budget=BUDGET))
    assert (loader.rank, loader.world_size) == (1, 3)
