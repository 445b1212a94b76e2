"""Tests of trainer/loader/rows.py, schema.py and table.py: many files as one table."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_files import tokens, values, write, write_sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import DataError, UsageError
from trainer.loader.rows import Rows, open_rows

IDS = [[1, 2, 3], [], [7], [9, 8, 7, 6, 5], [4, 4], [10, 11]]
MASK = pa.list_(pa.int8())


def table(ids: list[Any] = IDS) -> pa.Table:
    mask = [None if row is None else [1] * len(row) for row in ids]
    return pa.table({"ids": tokens(ids), "mask": tokens(mask, MASK), "text": ["x"] * len(ids)})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of three shards of both formats, with batches of 2, 2, 0 and 1, and 1 rows."""
    folder = tmp_path / "shards"
    folder.mkdir()
    all_rows = table()
    write(folder / "a.arrow", all_rows[:4], rows=2)
    write(folder / "b.arrows", all_rows[:0], all_rows[4:5], stream=True)
    write(folder / "c.feather", all_rows[5:])
    return folder


def test_shards_are_one_table_in_the_order_of_their_names(shards: Path) -> None:
    rows = open_rows(shards)
    assert len(rows) == 6
    assert list(rows.columns) == ["ids", "mask"]
    assert values(rows, "ids") == IDS
    assert values(rows, "mask") == [[1] * len(row) for row in IDS]
    assert rows.columns["ids"].dtype == np.int32
    assert rows.lengths.tolist() == [3, 0, 1, 5, 2, 2]
    assert rows.nbytes == sum(path.stat().st_size for path in shards.iterdir())
    assert (rows.null_rows, rows.decoded) == (0, 0)
    assert [rows.where(row) for row in (0, 3, 4, 5)] == [
        "a.arrow, row 0",
        "a.arrow, row 3",
        "b.arrows, row 0",
        "c.feather, row 0",
    ]
    for row in (-1, 6):
        with pytest.raises(IndexError):
            rows.where(row)


def test_one_path_or_several_are_given_in_any_form(shards: Path) -> None:
    a, c = shards / "a.arrow", shards / "c.feather"
    assert values(open_rows(str(a)), "ids") == IDS[:4]
    assert values(open_rows([c, a]), "ids") == IDS[5:] + IDS[:4]
    assert values(open_rows([shards, str(c)]), "ids") == IDS + IDS[5:]


def test_columns_come_as_asked_and_the_others_are_left_out_with_the_reason(shards: Path) -> None:
    assert set(open_rows(shards).left_out) == {"text"}
    assert "string is not read as numbers" in open_rows(shards).left_out["text"]
    rows = open_rows(shards, columns=["mask"])
    assert list(rows.columns) == ["mask"]
    assert set(rows.left_out) == {"ids", "text"}
    assert rows.left_out["ids"] == "not asked for"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (["idz"], "there is no column idz. Did you mean ids"),
        (["something"], "It has ids, mask, text"),
        (["text"], "column text: string is not read as numbers; read are"),
        ([], "columns is empty"),
        (["ids", "ids"], "names one twice"),
        ("ids", "a name, not a list"),
    ],
)
def test_a_call_for_columns_that_cannot_be_read_is_refused(
    shards: Path, columns: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        open_rows(shards, columns=columns)


def test_no_path_and_no_column_of_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no path is given"):
        open_rows([])
    path = write(tmp_path / "a", pa.table({"text": ["a"]}))
    with pytest.raises(DataError, match=r"no column can be read \(text: string"):
        open_rows(path)


def test_two_columns_of_one_name_are_left_out_and_refused_when_asked_for(tmp_path: Path) -> None:
    batch = pa.record_batch([tokens([[1]])] * 3, names=["ids", "ids", "mask"])
    path = write(tmp_path / "a", batch)
    assert open_rows(path).left_out == {"ids": "2 columns have this name"}
    with pytest.raises(UsageError, match="column ids: 2 columns have this name"):
        open_rows(path, columns=["ids"])


def test_bytes_are_read_when_asked_for_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a", pa.table({"ids": tokens([[1, 2]]), "image": [b"png"]}))
    assert "asked for by name" in open_rows(path).left_out["image"]
    assert values(open_rows(path, columns=["image"]), "image") == [list(b"png")]


def test_clips_and_single_numbers_are_dense_and_share_one_length(tmp_path: Path) -> None:
    clips = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2))
    path = write(tmp_path / "a", pa.table({"clip": clips, "label": [7, 8, 9]}), rows=2)
    rows = open_rows(path)
    assert values(rows, "clip") == [[1, 2], [3, 4], [5, 6]]
    assert values(rows, "label") == [7, 8, 9]
    assert [column.shape for column in rows.columns.values()] == [(2,), ()]
    assert rows.lengths.tolist() == [2, 2, 2]
    assert rows.lengths.strides == (0,)
    ragged = write(tmp_path / "b", pa.table({"label": [1, 2], "ids": tokens([[1], [2, 3]])}))
    assert open_rows(ragged).lengths.tolist() == [1, 2]


def test_null_rows_are_counted_once_and_have_no_values(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "a", table([[1], None, [2, 3], None, []]), rows=2))
    assert values(rows, "ids") == [[1], [], [2, 3], [], []]
    assert rows.null_rows == 2


@pytest.mark.parametrize(
    ("ids", "mask", "why"),
    [
        ([[1], [2, 3], [4]], [[1], [1], [1]], "row 1: ids has 2 values, mask 1. Columns"),
        ([[1], [2, 3], [4]], [[1], [1, 1], None], "row 2: ids has 1 values, mask 0"),
        ([[1], [2], [3, None]], [[1], [1], [1, 1]], "row 2: column ids: it has null values"),
    ],
)
def test_a_row_at_fault_is_named_by_its_shard_and_place_in_it(
    tmp_path: Path, ids: list[Any], mask: list[Any], why: str
) -> None:
    good = write(tmp_path / "good", pa.table({"ids": tokens([[1]]), "mask": tokens([[1]], MASK)}))
    bad = pa.table({"ids": tokens(ids), "mask": tokens(mask, MASK)})
    with pytest.raises(DataError, match=f"bad: {why}"):
        open_rows([good, write(tmp_path / "bad", bad, rows=1)])


def test_a_null_clip_is_refused(tmp_path: Path) -> None:
    clip = pa.array([[1.0], None], pa.list_(pa.float32(), 1))
    path = write(tmp_path / "clips", pa.table({"clip": clip}))
    with pytest.raises(DataError, match="clips: row 1: column clip: it is null"):
        open_rows(path)


def test_shards_whose_columns_differ_are_both_named(tmp_path: Path) -> None:
    first = write(tmp_path / "first", table())
    for other, why in (
        (pa.table({"ids": tokens(IDS)}), "mask is missing; .*first has int8"),
        (table().set_column(0, "ids", tokens(IDS, pa.list_(pa.int64()))), "ids is int64"),
        (table().set_column(0, "ids", pa.array(["x"] * 6)), "ids string is not read"),
    ):
        with pytest.raises(DataError, match=f"second: column {why}"):
            open_rows([first, write(tmp_path / "second", other)], columns=["ids", "mask"])
    large = table().set_column(0, "ids", tokens(IDS, pa.large_list(pa.int32())))
    same = open_rows([first, write(tmp_path / "second", large.append_column("more", [[1] * 6]))])
    assert values(same, "ids") == IDS * 2


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_buffers_are_decoded_with_one_warning_of_their_size(
    tmp_path: Path, codec: str, stream: bool
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    ids = [[7] * 5000] * 10
    paths = [
        write(tmp_path / name, table(ids), rows=2, options=options, stream=stream)
        for name in ("a", "b")
    ]
    with pytest.warns(UserWarning, match=r"0\.5 MB of values .* beginning with .*a:") as caught:
        rows = open_rows(paths)
    assert len(caught) == 1
    assert rows.decoded == 2 * 10 * 5000 * 5
    assert values(rows, "ids") == ids * 2


def test_files_without_rows_are_read_as_such(tmp_path: Path) -> None:
    empty = table()[:0]
    for name, batches in (("none", 0), ("one", 1)):
        with pa.ipc.new_file(str(tmp_path / name), empty.schema) as writer:
            for _ in range(batches):
                writer.write_batch(pa.RecordBatch.from_pylist([], empty.schema))
        rows = open_rows(tmp_path / name)
        assert (len(rows), rows.lengths.shape, list(rows.columns)) == (0, (0,), ["ids", "mask"])
    full = write(tmp_path / "full", table())
    rows = open_rows([tmp_path / "none", tmp_path / "one", full])
    assert rows.where(0) == "full, row 0"


@pytest.fixture
def saved() -> Path:
    return Path(__file__).parents[2] / "data" / "datasets"


def test_a_saved_dataset_is_read_as_it_is(saved: Path) -> None:
    rows = open_rows(saved / "current")
    assert values(rows, "input_ids") == IDS
    assert rows.where(5) == "data-00001-of-00002.arrow, row 2"


def test_a_saved_dataset_with_indices_is_in_their_order(saved: Path) -> None:
    rows = open_rows(saved / "with-indices")
    order = [3, 2, 5, 4, 0, 1]
    assert values(rows, "input_ids") == [IDS[row] for row in order]
    assert values(rows, "loss_mask") == [[1] * len(IDS[row]) for row in order]
    assert rows.lengths.tolist() == [len(IDS[row]) for row in order]
    assert [rows.where(row) for row in (0, 5)] == ["dataset.arrow, row 3", "dataset.arrow, row 1"]


def reindexed(saved: Path, folder: Path, indices: pa.Table) -> Path:
    shutil.copytree(saved / "with-indices", folder, dirs_exist_ok=True)
    write(folder / "indices.arrow", indices, stream=True)
    return folder


def test_indices_may_select_and_repeat_and_are_checked(saved: Path, tmp_path: Path) -> None:
    some = pa.table({"indices": pa.array([5, 0, 5], pa.uint64())})
    assert values(open_rows(reindexed(saved, tmp_path / "x", some)), "input_ids") == [
        [10, 11],
        [1, 2, 3],
        [10, 11],
    ]
    for column, why in (
        (pa.array([0, 6], pa.uint64()), "beyond the 6 rows"),
        (pa.array([2**64 - 1], pa.uint64()), "beyond the 6 rows"),
        (pa.array([0, -1]), "beyond the 6 rows"),
        (pa.array([0, None], pa.uint64()), "nulls"),
        (pa.array(["0"]), "one column of whole numbers"),
    ):
        with pytest.raises(DataError, match=f"indices.arrow: it has {why}|{why}"):
            open_rows(reindexed(saved, tmp_path / "x", pa.table({"indices": column})))


def test_the_fingerprint_is_that_of_the_data_wherever_it_lies(shards: Path, tmp_path: Path) -> None:
    print_of = open_rows(shards).fingerprint
    moved = Path(shutil.copytree(shards, tmp_path / "moved"))
    assert open_rows(moved).fingerprint == print_of
    assert open_rows(shards, columns=["mask", "ids"]).fingerprint == print_of
    others = {
        open_rows(shards, columns=["ids"]).fingerprint,
        open_rows(sorted(shards.iterdir(), reverse=True)).fingerprint,
        open_rows(sorted(shards.iterdir())[:2]).fingerprint,
    }
    write(moved / "c.feather", table([[10, 11]]))  # the same again
    assert open_rows(moved).fingerprint == print_of
    size = (moved / "c.feather").stat().st_size
    write(moved / "c.feather", table([[10]]))
    assert (moved / "c.feather").stat().st_size == size
    others.add(open_rows(moved).fingerprint)
    shutil.move(moved / "c.feather", moved / "d.feather")
    others.add(open_rows(moved).fingerprint)
    assert len(others | {print_of}) == 6


def test_the_fingerprint_changes_with_the_indices(saved: Path, tmp_path: Path) -> None:
    prints = {
        open_rows(
            reindexed(saved, tmp_path / "x", pa.table({"indices": pa.array(order, pa.uint64())}))
        ).fingerprint
        for order in ([0, 4], [4, 0], [0, 4])
    }
    assert len(prints) == 2


def test_pickled_rows_are_opened_again_and_refused_when_they_changed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shards)
    pickled = pickle.dumps(open_rows("a.arrow", columns=["ids"]))
    assert len(pickled) < 1000
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(pickled)
    assert isinstance(again, Rows)
    assert (values(again, "ids"), list(again.columns)) == (IDS[:4], ["ids"])
    write(shards / "a.arrow", table()[:3])
    with pytest.raises(DataError, match=r"a\.arrow: the files are not those that were opened"):
        pickle.loads(pickled)


def test_rows_are_asked_for_ahead_and_brought_into_memory(shards: Path) -> None:
    rows = open_rows(shards)
    rows.will_need(np.array([5, 1, 3]))
    rows.will_need(np.empty(0, np.int64))
    assert values(rows, "ids") == IDS
    assert rows.preload()
    assert not rows.preload(lambda: True)


def test_a_view_outlives_its_rows_and_a_file_that_is_replaced(shards: Path) -> None:
    rows = open_rows(shards)
    view = rows.columns["ids"].view(3)
    write(shards / "new", table([[0] * 5] * 4)).replace(shards / "a.arrow")
    rows.check_sizes()
    del rows
    assert view.tolist() == IDS[3]


def test_a_file_cut_short_in_place_is_found_before_it_is_touched(shards: Path) -> None:
    rows = open_rows(shards)
    os.truncate(shards / "a.arrow", 100)
    with pytest.raises(DataError, match=r"a\.arrow: it was cut short while it was read"):
        rows.check_sizes()


@st.composite
def tables(draw: st.DrawFn) -> list[pa.Table]:
    """Shards with token columns that agree, a clip and a label; their chunks are slices."""
    list_of = draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view, pa.large_list_view]))
    kind = list_of(draw(st.sampled_from([pa.int16(), pa.int64()])))
    return draw(st.lists(chunked(kind, list_of(pa.uint8())), min_size=1, max_size=3))


@st.composite
def chunked(draw: st.DrawFn, kind: pa.DataType, mask: pa.DataType) -> pa.Table:
    ids = draw(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=10))
    whole = pa.table(
        {
            "ids": pa.array(ids, kind),
            "mask": pa.array([[1] * len(row) for row in ids], mask),
            "clip": pa.array([[len(row), 2.5] for row in ids], pa.list_(pa.float64(), 2)),
            "label": pa.array([len(row) for row in ids], pa.uint16()),
        }
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    parts = zip([0, *cuts], [*cuts, len(ids)], strict=True)
    return pa.concat_tables([whole[begin:end] for begin, end in parts])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.booleans(), st.integers(1, 5))
def test_what_was_written_is_read(
    tmp_path: Path, written: list[pa.Table], stream: bool, rows_a_batch: int
) -> None:
    paths = [
        write(tmp_path / f"{i}.arrow", each, stream=stream, rows=rows_a_batch)
        for i, each in enumerate(written)
    ]
    rows = open_rows(paths)
    whole = pa.concat_tables(written)
    for name in whole.column_names:
        assert values(rows, name) == whole.column(name).to_pylist()


def test_opening_reads_no_values_and_holds_twelve_bytes_a_row(tmp_path: Path) -> None:
    """64 GiB in 4 sparse files: 8 times the values that chunks joined to one could hold."""
    path = write_sparse(tmp_path / "0.arrow", batches=64, rows=1024, length=65536)
    assert path.stat().st_size > 16 * 2**30
    paths = [path, *(tmp_path / f"{i}.arrow" for i in (1, 2, 3))]
    for link in paths[1:]:
        link.hardlink_to(path)
    code = """
import sys
from trainer.loader.rows import open_rows

def memory():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return {key: int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}

open_rows(sys.argv[1])
before = memory()
rows = open_rows(sys.argv[1:])
after = memory()
assert rows.columns["ids"].view(len(rows) - 1).tolist() == [0] * 65536
print(len(rows), *(after[key] - before[key] for key in before))
"""
    told = subprocess.check_output([sys.executable, "-c", code, *paths], text=True)
    count, anonymous, mapped = map(int, told.split())
    assert count == 4 * 64 * 1024
    assert anonymous < 12 * count + 2**21
    assert mapped < 2**26  # the pages of metadata and offsets, and those beside them
