"""What a fresh worker puts in place of its predecessor's checkpoints: a whole group, or nothing."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointing import FOLDER, LARGE, RUN, FreshVm, Vm

from protocol.errors import RefusedError
from protocol.messages import CheckpointsGrouped, Content, PutFile
from syncd.delivery import restores as module


def step(number: int) -> dict[str, bytes]:
    """The files of one checkpoint, each in a chunk of its own."""
    return {
        f"step-{number}/{kind}.pt": f"{kind}{number}".encode() * (LARGE // 6)
        for kind in ("model", "optim")
    }


@pytest.fixture
def fresh(vm: Vm, tmp_path: Path) -> Iterator[FreshVm]:
    """A worker that was told of two checkpoints, of two files each."""
    for number in (1, 2):
        for name, data in step(number).items():
            vm.save(name, data, made=number)
        vm.bring()
    fresh = FreshVm(tmp_path / "fresh", vm.chunks)
    fresh.hear(list(vm.checkpoints.restate()))
    yield fresh
    fresh.state.close()


def chunk_of(vm: Vm, name: str) -> str:
    sha256 = hashlib.sha256(step(int(name.split("/")[0][-1]))[name]).hexdigest()
    (piece,) = vm.contents.pieces(sha256)
    return piece.object


def test_the_newest_group_is_put_in_place(fresh: FreshVm) -> None:
    assert len(fresh.restores.missing()) == 4
    assert fresh.restores.fetch()
    assert fresh.found() == step(1) | step(2)
    assert fresh.restores.missing() == []
    assert fresh.restores.problems == {}


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_of_a_group_that_is_broken_nothing_is_put_in_place_and_an_older_one_is_used(
    vm: Vm, fresh: FreshVm, harm: str
) -> None:
    chunk = chunk_of(vm, "step-2/optim.pt")
    whole = vm.chunks.kept.pop(chunk)
    if harm == "damaged":
        vm.chunks.kept[chunk] = whole[:5000] + b"x" + whole[5001:]
    assert fresh.restores.fetch()
    assert fresh.found() == step(1)
    assert list(fresh.restores.problems) == [f"{FOLDER}/step-2/optim.pt"]
    assert not (fresh.root / FOLDER / "step-2").exists()
    assert not (fresh.root / ".syncd" / "restored").exists()
    vm.chunks.kept[chunk] = whole
    assert fresh.restores.fetch()
    assert fresh.found() == step(1), "its stage goes on from what it has found"


def test_what_grows_in_a_folder_that_is_left_out_is_left_out_too(vm: Vm, fresh: FreshVm) -> None:
    del vm.chunks.kept[chunk_of(vm, "step-2/optim.pt")]
    logs = ("step-2/train.log", "step-1/train.log", "curves/train.jsonl", "all.jsonl")
    for name in logs:
        blob = name.encode()
        sha256 = hashlib.sha256(blob).hexdigest()
        put = PutFile(path=f"{FOLDER}/{name}", size=len(blob), mode=0o644, sha256=sha256)
        fresh.hear([Content(sha256=sha256, size=len(blob), blob=blob), put])
    assert fresh.restores.fetch()
    assert fresh.files.fetch()
    assert set(fresh.found()) == set(step(1)) | set(logs[1:])


def test_a_group_of_which_not_every_file_was_said_is_not_used(vm: Vm, fresh: FreshVm) -> None:
    fresh.files.restart([])
    said = [
        message
        for message in vm.checkpoints.restate()
        if not (isinstance(message, PutFile) and message.path.endswith("step-2/optim.pt"))
    ]
    fresh.hear(said)
    assert fresh.restores.fetch()
    assert fresh.found() == step(1)


def test_files_of_which_the_group_was_not_said_are_not_used(vm: Vm, fresh: FreshVm) -> None:
    fresh.files.restart([])
    said = [m for m in vm.checkpoints.restate() if not isinstance(m, CheckpointsGrouped)]
    fresh.hear(said)
    assert fresh.restores.fetch()
    assert fresh.found() == {}
    assert list(fresh.restores.problems) == [FOLDER]


def test_while_the_disk_is_full_nothing_is_decided(
    fresh: FreshVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fresh.contents, "room_for", lambda sha256, size: size < 3 * LARGE)
        assert not fresh.restores.fetch()
    assert "the disk is full" in fresh.restores.waits
    assert len(fresh.restores.missing()) == 4
    assert fresh.found() == {}
    assert fresh.restores.fetch()
    assert fresh.restores.waits == ""
    assert fresh.found() == step(1) | step(2)


def test_a_disk_that_gets_full_meanwhile_is_no_fault_of_the_group(
    fresh: FreshVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fresh.contents, "place", fill)
        assert not fresh.restores.fetch()
    assert "No space left" in fresh.restores.waits
    assert fresh.restores.problems == {}
    assert fresh.restores.fetch()
    assert fresh.found() == step(1) | step(2)


class Killed(BaseException):
    """Ends the daemon at once."""


def kill_at(monkeypatch: pytest.MonkeyPatch, move: int) -> None:
    """Have the daemon killed before it moves that file, counted from 1."""
    real, moves = module.rename_durable, []

    def rename(source: Path, target: Path) -> None:
        moves.append(target)
        if len(moves) == move:
            raise Killed
        real(source, target)

    monkeypatch.setattr(module, "rename_durable", rename)


@pytest.mark.parametrize("move", [1, 2, 4])
def test_a_daemon_killed_while_it_puts_a_group_in_place_does_so_at_its_next_start(
    vm: Vm, fresh: FreshVm, monkeypatch: pytest.MonkeyPatch, move: int
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, move)
        with pytest.raises(Killed):
            fresh.restores.fetch()
    fresh.restart()
    vm.chunks.kept.clear()  # what was fetched once is not fetched again
    assert fresh.restores.fetch()
    assert fresh.found() == step(1) | step(2)


def test_what_a_killed_daemon_had_put_in_place_of_a_broken_group_is_removed(
    vm: Vm, fresh: FreshVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            fresh.restores.fetch()
    assert len(fresh.found()) == 3
    fresh.restart()
    for path in (fresh.root / ".syncd" / "restored").iterdir():
        path.unlink()
    del vm.chunks.kept[chunk_of(vm, "step-2/optim.pt")]
    assert fresh.restores.fetch()
    assert fresh.found() == step(1)


def test_a_folder_that_is_a_link_is_not_followed(fresh: FreshVm) -> None:
    outside = fresh.root / "outside"
    outside.mkdir()
    (fresh.root / "store" / "checkpoints").mkdir(parents=True)
    (fresh.root / FOLDER).symlink_to(outside)
    assert fresh.restores.fetch()
    assert list(outside.iterdir()) == []
    assert any("a folder of it is a link" in why for why in fresh.restores.problems.values())


def test_a_folder_in_the_place_of_a_file_breaks_its_group_alone(fresh: FreshVm) -> None:
    (fresh.root / FOLDER / "step-2" / "model.pt").mkdir(parents=True)
    assert fresh.restores.fetch()
    assert fresh.found() == step(1)


def test_a_store_on_another_disk_is_copied_to(
    fresh: FreshVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(module, "rename_durable", refuse)
    assert fresh.restores.fetch()
    assert fresh.found() == step(1) | step(2)


def test_files_of_a_worker_that_knew_no_groups_are_put_in_place_one_by_one(
    vm: Vm, fresh: FreshVm
) -> None:
    fresh.state.run("UPDATE remote_files SET first = 0")
    fresh.state.run("DELETE FROM remote_groups")
    del vm.chunks.kept[chunk_of(vm, "step-2/optim.pt")]
    assert fresh.restores.fetch()
    assert sorted(fresh.found()) == ["step-1/model.pt", "step-1/optim.pt", "step-2/model.pt"]
    assert list(fresh.restores.problems) == [f"{FOLDER}/step-2/optim.pt"]


def test_a_group_of_a_run_that_can_be_none_is_refused(fresh: FreshVm) -> None:
    for run in ("../x", "a/../b", ""):
        with pytest.raises(RefusedError):
            fresh.hear([CheckpointsGrouped(run_id=run, number=1, files=1)])
    assert fresh.state.rows("SELECT DISTINCT run FROM remote_groups") == [(RUN,)]
