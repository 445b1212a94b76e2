"""Tests of trainer/loader/folders.py: which files a path means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.errors import DataError, UsageError
from trainer.loader.folders import Found, find_shards

SAVED = Path(__file__).parents[2] / "data" / "datasets"


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_a_file_is_itself_whatever_its_name(tmp_path: Path) -> None:
    assert find_shards(tmp_path / "x") == Found(shards=(tmp_path / "x",))


def test_a_folder_is_its_arrow_files_by_name_and_no_folder_within(tmp_path: Path) -> None:
    folder = touch(tmp_path / "f", "b.arrow", "a.arrows", "c.feather", "d.parquet", "notes.txt")
    touch(folder / "e.arrow")
    assert [path.name for path in find_shards(folder).shards] == [
        "a.arrows",
        "b.arrow",
        "c.feather",
    ]


def test_a_folder_without_arrow_files_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no files"):
        find_shards(touch(tmp_path / "empty"))
    folder = touch(tmp_path / "f", "a.parquet", "b.parquet", "README")
    with pytest.raises(DataError, match=r"has no .arrow.*it has 2 .parquet, 1 README"):
        find_shards(folder)


def test_a_saved_dataset_lists_its_own_files() -> None:
    names = [path.name for path in find_shards(SAVED / "current").shards]
    assert names == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    found = find_shards([SAVED / "with-indices"])
    assert [path.name for path in (*found.shards, *found.indices)] == [
        "dataset.arrow",
        "indices.arrow",
    ]


def test_the_order_is_that_of_the_state_and_other_files_are_not_taken(tmp_path: Path) -> None:
    folder = touch(tmp_path / "f", "a.arrow", "b.arrow", "cache-1.arrow")
    listed = [{"filename": "b.arrow"}, {"filename": "a.arrow"}]
    for key in ("_indices_data_files", "_indices_files", None):
        state = {"_data_files": listed} | ({key: [{"filename": "i"}]} if key else {})
        (folder / "state.json").write_text(json.dumps(state))
        found = find_shards(folder)
        assert [path.name for path in found.shards] == ["b.arrow", "a.arrow"]
        assert found.indices == ((folder / "i",) if key else ())


def test_a_dataset_dict_is_refused_with_the_folders_of_its_splits() -> None:
    with pytest.raises(DataError, match=r"DatasetDict.*Name one of them: .*splits/train, .*/test"):
        find_shards(SAVED / "splits")


def test_a_dataset_with_indices_is_refused_beside_others() -> None:
    with pytest.raises(UsageError, match="cannot be one of several"):
        find_shards([SAVED / "current", SAVED / "with-indices"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "state.json: Expecting"),
        ("[]", "no JSON object"),
        ("{}", "it names no _data_files"),
        ('{"_data_files": [{"name": "a"}]}', "_data_files is not a list of file names"),
        ('{"_data_files": 7}', "_data_files is not a list of file names"),
        ('{"_data_files": [{"filename": 7}]}', "_data_files is not a list of file names"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(DataError, match=why):
        find_shards(tmp_path)
