"""Which files go next, and that they can be read although they are removed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.checkpoints import TOGETHER_SECONDS
from syncd.delivery.turns import MOST_HELD, first_turn, held

APART = int(TOGETHER_SECONDS * 1e9) + 1
A, B = "store/checkpoints/pretrain.0001.7f3a", "store/checkpoints/finetune.0002.7f3a"


@dataclass(frozen=True)
class File:
    path: str
    changed_ns: int = 0


def test_of_a_runs_checkpoints_the_newest_goes_and_the_others_wait() -> None:
    old, new = File(f"{A}/5.pt", 0), File(f"{A}/10.pt", APART)
    assert first_turn([old, new]) == ([new], [old])
    assert first_turn([new, old]) == ([new], [old])


def test_what_was_made_along_with_it_goes_along_the_oldest_first() -> None:
    weights, manifest = File(f"{A}/10.pt", 3 * APART), File(f"{A}/10.json", 3 * APART + 1000)
    old = File(f"{A}/5.pt", 0)
    assert first_turn([manifest, old, weights]) == ([weights, manifest], [old])


def test_no_run_waits_for_another_nor_any_other_file_for_a_checkpoint() -> None:
    files = [
        File(f"{A}/1", 9 * APART),
        File(f"{B}/1", 0),
        File("in/artifacts/x", 99),
        File("store/y"),
    ]
    now, later = first_turn(files)
    assert [file.path for file in now] == ["in/artifacts/x", "store/y", f"{B}/1", f"{A}/1"]
    assert later == []


def test_a_file_that_is_held_can_be_read_after_it_was_removed_or_replaced(tmp_path: Path) -> None:
    removed, replaced = tmp_path / "removed", tmp_path / "replaced"
    removed.write_bytes(b"one")
    replaced.write_bytes(b"two")
    with held([removed, replaced]) as readable:
        removed.unlink()
        (tmp_path / "new").write_bytes(b"other")
        os.replace(tmp_path / "new", replaced)
        for _ in range(2):
            assert readable[removed].read_bytes() == b"one"
            assert readable[replaced].read_bytes() == b"two"


def test_what_is_held_looks_as_it_did(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    before = path.stat()
    with held([path]):
        assert path.stat() == before
    assert path.stat() == before


def test_what_cannot_be_held_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [tmp_path / "missing", tmp_path / "link"]
    with held(paths) as readable:
        assert readable == {path: path for path in paths}


def test_no_more_are_held_than_may_be_and_none_afterwards(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(MOST_HELD + 5)]
    for path in paths:
        path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with held(paths) as readable:
        assert len(os.listdir("/proc/self/fd")) == before + MOST_HELD
        assert [path for path in paths if readable[path] == path] == paths[MOST_HELD:]
    assert len(os.listdir("/proc/self/fd")) == before


def test_they_are_let_go_when_the_work_on_them_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="cut"), held([tmp_path / "file"]):
        raise OSError("cut")
    assert len(os.listdir("/proc/self/fd")) == before
