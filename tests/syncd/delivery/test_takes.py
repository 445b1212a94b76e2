"""A folder taken as it is at a moment, while its stage goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointing import FOLDER, RUN

from syncd.delivery import holds as holds_module
from syncd.delivery import takes as module
from syncd.delivery.files import Found
from syncd.delivery.holds import Holds
from syncd.delivery.takes import RESTLESS, TRIES, Snapshot, Takes, look_at


class Folder:
    """A run's folder; files of which the name begins with `busy` were always just written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / FOLDER
        self.path.mkdir(parents=True)
        held = root / "held"
        held.mkdir()
        self.holds = Holds(held)
        self.takes = Takes(root, self.holds)

    def replace(self, name: str, data: bytes) -> None:
        (self.path / "new.tmp").write_bytes(data)
        (self.path / "new.tmp").replace(self.path / name)

    def take(self, *, gone: bool = False, final: bool = False) -> Snapshot | None:
        seen = look_at(self.root, RUN)
        return self.takes.take(RUN, seen, seen.files, gone=gone, final=final)

    def take_until(self, before: Callable[[int], None], **how: bool) -> Snapshot | None:
        """Take it again and again, as a daemon does, each time after something was done."""
        for number in range(2 * TRIES + 1):
            before(number)
            if snapshot := self.take(**how):
                return snapshot
        return None

    def held(self) -> int:
        return len(list((self.root / "held").iterdir()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(Found, "settled", lambda self, seconds: "/busy" not in self.path)
    return Folder(tmp_path)


def contents(snapshot: Snapshot | None) -> dict[str, bytes]:
    assert snapshot is not None
    return {Path(t.found.path).name: t.held.read_bytes() for t in snapshot.taken}


def test_a_folder_at_rest_is_taken_at_once_and_held_though_it_changes(folder: Folder) -> None:
    folder.replace("1.pt", b"one")
    snapshot = folder.take()
    folder.replace("1.pt", b"another")
    assert contents(snapshot) == {"1.pt": b"one"}
    assert not folder.takes.unsettled


def test_a_folder_that_was_just_written_to_waits(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 1e9)
    folder.replace("busy.pt", b"one")
    for _ in range(9):
        assert folder.take() is None
    assert folder.takes.unsettled
    assert folder.held() == 0
    assert contents(folder.take(final=True)) == {"busy.pt": b"one"}


def test_a_file_that_is_replaced_all_the_time_is_taken_as_it_was(folder: Folder) -> None:
    folder.replace("1.pt", b"still")
    snapshot = folder.take_until(lambda number: folder.replace("busy.pt", b"%d" % number))
    assert contents(snapshot) == {"1.pt": b"still", "busy.pt": b"0"}
    assert snapshot is not None
    assert snapshot.missing == {}
    assert folder.held() == 2


def test_a_file_that_is_written_in_place_all_the_time_makes_the_group_incomplete(
    folder: Folder,
) -> None:
    folder.replace("1.pt", b"still")

    def write(number: int) -> None:
        (folder.path / "busy.csv").write_bytes(b"x" * number)

    snapshot = folder.take_until(write)
    assert contents(snapshot) == {"1.pt": b"still"}
    assert snapshot is not None
    assert snapshot.missing == {f"{FOLDER}/busy.csv": RESTLESS}
    assert folder.held() == 1


def test_what_is_being_written_while_nothing_else_is_new_is_waited_for(folder: Folder) -> None:
    def write(number: int) -> None:
        (folder.path / "busy.pt").write_bytes(b"x" * number)

    assert folder.take_until(write) is None
    assert folder.take_until(write, gone=True) is not None


def test_a_folder_that_changes_while_it_is_taken_is_left_for_later(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace("1.pt", b"one")
    real = folder.holds.take

    def take(path: Path, *, copied: bool) -> Path:
        folder.replace("2.pt", b"two")
        return real(path, copied=copied)

    with monkeypatch.context() as patch:
        patch.setattr(folder.holds, "take", take)
        assert folder.take() is None
    assert folder.takes.unsettled
    assert folder.held() == 0
    assert contents(folder.take()) == {"1.pt": b"one", "2.pt": b"two"}


def test_a_file_that_is_gone_before_it_was_taken_leaves_the_folder_for_later(
    folder: Folder,
) -> None:
    folder.replace("1.pt", b"one")
    seen = look_at(folder.root, RUN)
    (folder.path / "1.pt").unlink()
    assert folder.takes.take(RUN, seen, seen.files, gone=False, final=True) is None


def test_a_file_that_is_written_to_while_it_is_copied_is_not_taken(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace("1.pt", b"one")
    real = holds_module.shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        real(source, target)
        Path(source).write_bytes(b"longer")

    monkeypatch.setattr(holds_module.shutil, "copyfile", copy)
    folder.takes.give_up(RUN, Snapshot((), [], {}))
    assert folder.take() is None
    assert folder.held() == 0


def test_links_and_what_grows_are_no_part_of_a_folder_and_bad_names_are_missing(
    folder: Folder,
) -> None:
    folder.replace("1.pt", b"one")
    folder.replace("metrics.jsonl", b"{}")
    folder.replace("a:b.pt", b"bad")
    (folder.path / "last").symlink_to("1.pt")
    seen = look_at(folder.root, RUN)
    assert [found.path for found in seen.files] == [f"{FOLDER}/1.pt"]
    assert list(seen.missing) == [f"{FOLDER}/a:b.pt"]
