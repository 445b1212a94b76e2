"""The measures beside the race: clips, plans, waiting, memory, sparse shards, a cold disk."""

import os
import subprocess
import sys

import numpy as np
import pytest

from protocol.errors import DataError
from trainer.bench import clips, cold, memory, plans, sparse, waiting
from trainer.bench.interleaved import mapped, medians, pieces
from trainer.loader import Kernel, open_rows


@pytest.fixture(scope="module")
def clip_shards(tmp_path_factory):
    return clips.write_clips(tmp_path_factory.mktemp("clips"), 2000)


def test_clips_are_of_one_size_and_begin_with_their_row(clip_shards):
    column = open_rows(clip_shards).columns["clip"]
    assert (column.shape, column.dtype, len(column)) == ((2048,), np.dtype(np.float32), 2000)
    assert [int(column.view(row)[0]) for row in range(2000)] == list(range(2000))


def test_clips_are_measured_with_each_kernel(clip_shards):
    found = clips.figures(clip_shards, [Kernel.NUMPY])
    assert [figure.goal for figure in found] == ["<= 3", ""]
    assert all(figure.value > 0 for figure in found)


def test_the_share_of_real_tokens_is_that_of_the_plan(work):
    source = open_rows(work.corpus.shards)
    bucketed, packed = plans.real_tokens(source)
    # 400 rows fill few batches, but sorted ones are fuller than unsorted, and packed ones fullest.
    assert bucketed.baseline < bucketed.value <= packed.value <= 100
    assert (bucketed.goal, packed.goal) == (">= 97", ">= 99.5")


def test_plans_and_resuming_are_timed_for_each_batching_and_step(work):
    source = open_rows(work.corpus.shards)
    assert [figure.name for figure in plans.planning(source)] == [
        "plan: 400 rows, bucketed",
        "plan: 400 rows, packed",
    ]
    resumed = plans.resuming(source)
    assert {figure.name for figure in resumed} == {
        "plan: resume at the last step",
        "plan: resume at the last step, against the first",
    }
    assert {figure.baseline_name for figure in resumed} >= {"at the first step"}


def test_a_consumers_wait_is_a_share_of_its_time(clip_shards, work, monkeypatch):
    monkeypatch.setattr(waiting, "WARM", 2)
    monkeypatch.setattr(waiting, "ROUNDS", 1)
    found = waiting.waiting(open_rows(work.corpus.shards))
    assert [figure.goal for figure in found] == ["< 1", ""]
    assert all(0 <= figure.value <= 100 for figure in found)


@pytest.mark.skipif(not memory.SMAPS.exists(), reason="the system does not tell")
def test_memory_is_measured_in_a_process_of_its_own(clip_shards):
    opened, loaded = memory.figures(clip_shards[0].parent)
    assert opened.name == "memory: 2000 clips, opened"
    assert loaded.goal.startswith("<= ")
    assert loaded.baseline == pytest.approx(2000 * 8192 / 1e6, rel=0.01)


@pytest.mark.skipif(not memory.SMAPS.exists(), reason="the system does not tell")
def test_memory_that_is_taken_is_seen():
    code = (
        "from trainer.bench.memory import anonymous; b = anonymous(); x = bytearray(b'1' * 2**25);"
        "print(anonymous() - b)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 2**25


def test_sparse_shards_hold_rows_of_zeros_and_take_no_space(tmp_path):
    shards = sparse.write_sparse(tmp_path, shards=2, batches=3, rows=64)
    source = open_rows(shards)
    assert len(source) == 2 * 3 * 64
    assert set(source.lengths.tolist()) == {sparse.TOKENS_A_ROW}
    assert not source.columns["ids"].view(300).any()
    assert source.decoded == 0
    assert source.nbytes > 2 * 3 * 64 * sparse.TOKENS_A_ROW * 5
    assert sum(path.stat().st_blocks * 512 for path in shards) < source.nbytes / 10


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2**25))
    return path


def readable_without_waiting(path):
    try:
        with open(path, "rb") as file:
            return cold.cached(file.fileno()) > 0
    except (OSError, AttributeError):
        return False


def test_a_file_is_put_out_of_the_page_cache_but_not_while_it_is_mapped(large):
    if not readable_without_waiting(large):
        pytest.skip("this file system does not tell what is cached")
    cold.put_out([large])
    mapped = np.memmap(large, dtype=np.uint8, mode="r")
    assert mapped.sum(dtype=np.int64) > 0  # reads all of it, and so all of it is mapped
    with pytest.raises(DataError, match="somebody has them mapped"):
        cold.put_out([large])
    del mapped
    cold.put_out([large])


def test_measures_take_turns_and_the_median_counts():
    calls: list[str] = []
    values = {"a": iter([3.0, 1.0, 2.0]), "b": iter([9.0, 9.0, 7.0])}

    def measure(name):
        calls.append(name)
        return next(values[name])

    found = medians({name: lambda name=name: measure(name) for name in values}, 3)
    assert found == {"a": 2.0, "b": 9.0}
    assert calls == ["a", "b"] * 3


def test_pieces_are_of_their_sizes_and_lie_within_a_map(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 5000)
    found = pieces(mapped(paths), [10, 4999, 5000, 1] * 20, np.random.default_rng(0))
    assert [len(piece) for piece in found] == [10, 4999, 5000, 1] * 20
    assert {int(piece[0]) for piece in found} == {0, 1}
    assert all(set(piece.tolist()) == {int(piece[0])} for piece in found)
