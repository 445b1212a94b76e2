"""Checkpoints of a stage that saves and prunes as it likes, over a line of the test's choice."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from checkpointing import FOLDER, LARGE, RUN, Vm, restored

from protocol.errors import RemoteError
from protocol.messages import PutFile
from syncd.delivery import checkpoints as checkpoints_module
from syncd.delivery import holds as holds_module
from syncd.rclone.remote import Transient


def test_a_checkpoint_is_safe_once_its_bytes_are_proved(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    assert vm.safe() == []
    assert vm.prove() == []
    assert vm.safe() == ["1.pt"]
    newest = vm.checkpoints.newest_safe(RUN)
    assert newest is not None
    assert (newest.name, newest.made, newest.how) == ("1.pt", 1.0, "the remote's sha256")
    assert vm.bring() == []  # nothing is new, whatever links came and went


def test_files_of_any_size_are_brought_as_chunks(vm: Vm) -> None:
    vm.save("empty", made=1).write_bytes(b"")
    vm.save("deep.json", b"{}", made=2)
    vm.bring()
    vm.prove()
    assert sorted(vm.safe()) == ["deep.json", "empty"]


def test_a_chunk_that_is_wrong_on_the_remote_is_brought_again(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)
    vm.bring()
    (chunk,) = vm.chunks.kept
    vm.chunks.kept[chunk] = vm.chunks.kept[chunk][:-1] + b"2"
    vm.remove("1.pt")  # what is held is as good
    assert vm.prove() == []
    assert vm.safe() == []
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    vm.prove()
    assert vm.safe() == ["1.pt"]
    assert len(vm.chunks.kept) == 2


def test_what_was_removed_goes_once_something_newer_is_safe(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.save("2.pt", made=2)
    vm.remove("1.pt")
    vm.remote.silent = True
    assert vm.bring() == ["content", "put 2.pt", "put 1.pt", "group of 1"]
    assert vm.prove() == []
    assert vm.on_remote() == {"1.pt", "2.pt"}
    vm.remote.silent = False
    assert vm.prove() == ["drop 1.pt"]
    assert vm.on_remote() == {"2.pt"}


def test_what_was_removed_goes_when_its_run_is_over(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.remove("1.pt")
    assert vm.bring() == []
    assert vm.prove() == []
    vm.over = True
    assert vm.prove() == ["drop 1.pt"]


def test_a_file_in_the_place_of_another_is_named_once_it_is_safe(vm: Vm) -> None:
    vm.save("latest.pt", b"one", made=1)
    vm.bring()
    vm.prove()
    vm.save("latest.pt", b"two", made=2)
    vm.remote.silent = True
    assert vm.bring() == ["content"]
    assert vm.say() == []
    assert vm.on_remote() == {"latest.pt"}
    vm.remote.silent = False
    assert vm.prove() == ["content", "put latest.pt", "group of 1"]
    assert [file.sha256 for file in vm.checkpoints.index().runs[RUN]] == [
        hashlib.sha256(b"two").hexdigest()
    ]


def test_a_checkpoint_that_is_pruned_on_its_way_arrives(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)
    vm.chunks.before = lambda: vm.remove("1.pt") if vm.found() else None
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    vm.prove()
    assert vm.safe() == ["1.pt"]


def test_a_stage_that_always_prunes_what_is_on_its_way_is_safe_again_and_again(vm: Vm) -> None:
    made = 0

    def go_on() -> None:
        nonlocal made
        made += 1
        vm.save(f"{made}.pt", made=made)
        for path in sorted(vm.found(), key=lambda f: f.made_ns)[:-2]:
            (vm.root / path.path).unlink()

    go_on()
    vm.chunks.before = lambda: [go_on() for _ in range(5)]
    newest = []
    for _ in range(3):
        vm.bring()
        vm.prove()
        newest.append(int(vm.checkpoints.newest_safe(RUN).name.removesuffix(".pt")))
    assert newest == sorted(set(newest))
    assert len(vm.on_remote()) <= 4


def test_the_newest_goes_first_and_what_it_superseded_not_at_all(vm: Vm) -> None:
    for number in (1, 2, 3):
        vm.save(f"{number}.pt", b"%d" % number * LARGE, made=number)
    sent = 0

    def prune() -> None:
        nonlocal sent
        sent += 1
        if sent == 1:
            vm.remove("1.pt")

    vm.chunks.before = prune
    assert vm.bring() == ["content", "content"]
    assert len(vm.chunks.kept) == 2
    # What it left is another folder than the one that was begun with, and whole by itself.
    assert vm.bring() == ["content", "put 2.pt", "content", "put 3.pt", "group of 2"]
    assert len(vm.chunks.kept) == 2


def test_one_that_was_on_its_way_when_the_line_broke_goes_on_although_it_is_pruned(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)

    def fail() -> None:
        raise Transient("send", why="the line is down")

    vm.chunks.before = fail
    with pytest.raises(RemoteError):
        vm.bring()
    vm.remove("1.pt")
    vm.save("2.pt", b"2" * LARGE, made=2)
    vm.chunks.before = lambda: None
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    vm.prove()
    assert vm.bring() == ["content", "put 2.pt", "put 1.pt", "group of 1"]
    assert vm.prove() == ["drop 1.pt"]


def test_nothing_is_held_once_it_is_safe_nor_by_a_daemon_that_is_gone(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    assert len(vm.held()) == 1
    vm.prove()
    vm.bring()
    assert vm.held() == []
    vm.holds.take(vm.root / FOLDER / "1.pt")
    vm.restart()
    assert vm.held() == []


def test_a_file_that_is_held_already_is_held_once(vm: Vm) -> None:
    path = vm.save("1.pt", made=1)
    sha256 = hashlib.sha256(b"1.pt").hexdigest()
    for _ in range(2):
        vm.holds.keep(vm.holds.take(path), sha256)
        assert vm.held() == [sha256]


def test_with_the_disk_nearly_full_the_oldest_that_is_only_held_is_let_go(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm.remote.silent = True
    for number in (1, 2, 3):
        vm.save(f"{number}.pt", made=number)
        vm.bring()
        if number > 1:
            vm.remove(f"{number - 1}.pt")
    held = {hashlib.sha256(f"{number}.pt".encode()).hexdigest() for number in (1, 2, 3)}
    assert set(vm.held()) == held
    monkeypatch.setattr(holds_module, "LOW_BYTES", 1 << 62)
    for number in (1, 2):
        vm.prove()
        held.remove(hashlib.sha256(f"{number}.pt".encode()).hexdigest())
        assert set(vm.held()) == held
    vm.prove()
    assert set(vm.held()) == held  # it costs nothing: its stage has it


def test_where_nothing_can_be_linked_there_are_copies_if_there_is_room(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    path = vm.save("1.pt", made=1)
    held = vm.holds.take(path)
    assert held.read_bytes() == b"1.pt"
    assert held.stat().st_ino != path.stat().st_ino
    monkeypatch.setattr(holds_module, "LOW_BYTES", 1 << 62)
    assert vm.holds.take(path) == path
    vm.holds.drop(path)
    assert path.exists()


def test_a_worker_that_was_restarted_knows_what_is_safe(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.restart()
    assert vm.safe() == ["1.pt"]
    assert vm.bring() == []


def test_what_is_lost_on_the_remote_and_nowhere_else_any_more_is_forgotten(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.bring()
    vm.remove("1.pt")
    with vm.state.transaction():
        vm.checkpoints.send_again(vm.contents.lose(set(vm.chunks.kept)))
    vm.bring()
    assert vm.checkpoints.index().runs == {}


# Whole or not at all


def rewrite(vm: Vm, name: str, data: bytes) -> None:
    """Write a file in place, without changing its length, as its stage would."""
    with open(vm.root / FOLDER / name, "r+b") as file:
        file.write(data)


def pair_of(vm: Vm, number: int) -> dict[str, bytes]:
    """Write both files of a step in place; return them."""
    for name, data in step(number).items():
        path = vm.root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return step(number)


def step(number: int) -> dict[str, bytes]:
    return {f"{kind}.pt": f"{kind}{number}".encode() * (LARGE // 6) for kind in ("model", "optim")}


def test_files_of_two_steps_are_never_safe_together(vm: Vm, tmp_path: Path) -> None:
    first = pair_of(vm, 1)
    vm.bring()
    vm.prove()
    pair_of(vm, 2)
    sent = []

    def overtake() -> None:
        sent.append(1)
        if len(sent) == 2:  # one file is on the remote
            pair_of(vm, 3)

    vm.chunks.before = overtake
    assert vm.bring() == []
    assert vm.checkpoints.unsettled
    assert "it changed meanwhile" in str(vm.checkpoints.problems)
    assert vm.prove() == []
    assert restored(vm, tmp_path / "a") == first
    vm.chunks.before = lambda: None
    vm.bring()
    vm.prove()
    assert vm.checkpoints.problems == {}
    assert restored(vm, tmp_path / "b") == step(3)


def test_a_save_that_pauses_between_its_files_is_not_taken_for_done(vm: Vm, tmp_path: Path) -> None:
    for number in (1, 2):
        pair_of(vm, number)
        vm.bring()
        vm.prove()
    (vm.root / FOLDER / "model.pt").write_bytes(b"the beginning")
    for _ in range(5):
        assert vm.bring() == vm.prove() == []
    assert restored(vm, tmp_path / "a") == step(2)
    pair_of(vm, 3)
    vm.bring()
    vm.prove()
    assert restored(vm, tmp_path / "b") == step(3)


def test_a_file_rewritten_with_its_time_set_back_is_not_taken_for_what_it_was(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)

    def rewrite_once() -> None:
        vm.chunks.before = lambda: None
        rewrite(vm, "1.pt", b"2" * LARGE)
        os.utime(vm.root / FOLDER / "1.pt", (1, 1))

    vm.chunks.before = rewrite_once
    assert vm.bring() == []
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    (file,) = vm.checkpoints.index().runs[RUN]
    assert file.sha256 == hashlib.sha256(b"2" * LARGE).hexdigest()


def test_what_is_always_rewritten_in_place_on_its_way_is_copied_first(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)
    vm.chunks.before = lambda: rewrite(vm, "1.pt", os.urandom(8))
    assert vm.bring() == []
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    vm.prove()
    assert vm.safe() == ["1.pt"]


def test_a_line_that_breaks_does_not_hide_what_was_rewritten_meanwhile(
    vm: Vm, tmp_path: Path
) -> None:
    pair_of(vm, 1)
    sent = []

    def fail() -> None:
        sent.append(1)
        if len(sent) == 2:
            raise Transient("send", why="the line is down")

    vm.chunks.before = fail
    with pytest.raises(RemoteError):
        vm.bring()
    rewrite(vm, "optim.pt", step(2)["optim.pt"])
    assert vm.bring() == []
    vm.bring()
    assert restored(vm, tmp_path / "a") == step(1) | {"optim.pt": step(2)["optim.pt"]}


def test_a_group_with_a_file_that_cannot_travel_is_incomplete_and_named(
    vm: Vm, tmp_path: Path
) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.save("2.pt", made=2)
    vm.save("optim:rank0.pt", made=2)
    assert vm.bring() == ["content"]
    vm.prove()
    newest = vm.checkpoints.newest_safe(RUN)
    assert newest is not None
    assert newest.name == "1.pt"
    assert vm.safe() == ["1.pt"]
    *_, last = vm.checkpoints.index().groups[RUN]
    assert (last.files, list(last.missing), last.safe) == (2, ["optim:rank0.pt"], False)
    (why,) = vm.checkpoints.problems.values()
    assert "incomplete" in why
    assert vm.checkpoints.is_behind()
    assert restored(vm, tmp_path / "a") == {"1.pt": b"1.pt"}
    assert vm.bring() == []
    assert len(vm.checkpoints.index().groups[RUN]) == 2, "nothing is new"
    vm.remove("optim:rank0.pt")
    vm.bring()
    vm.prove()
    assert sorted(vm.safe()) == ["1.pt", "2.pt"]
    assert vm.checkpoints.problems == {}


def test_a_group_with_a_file_that_cannot_be_read_is_incomplete(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm.save("model.pt", made=1)
    vm.save("optim.pt", made=2)
    real = checkpoints_module.file_sha256

    def deny(path: Path, size: int) -> str:
        if path.read_bytes() == b"optim.pt":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, size)

    monkeypatch.setattr(checkpoints_module, "file_sha256", deny)
    assert vm.bring() == ["content"]
    vm.prove()
    assert vm.safe() == []
    assert vm.checkpoints.newest_safe(RUN) is None
    assert "Permission denied" in vm.checkpoints.problems[f"{FOLDER}/optim.pt"]
    monkeypatch.setattr(checkpoints_module, "file_sha256", real)
    vm.bring()
    vm.prove()
    assert sorted(vm.safe()) == ["model.pt", "optim.pt"]


def test_links_and_files_that_grow_are_no_part_of_a_group(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    vm.save("metrics.jsonl", made=1)
    (vm.root / FOLDER / "last").symlink_to("1.pt")
    vm.bring()
    vm.prove()
    assert vm.safe() == ["1.pt"]


def test_a_small_file_that_is_newer_is_no_newer_checkpoint(vm: Vm, tmp_path: Path) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)
    vm.save("metrics.json", b"{}", made=1)
    vm.bring()
    vm.prove()
    vm.remove("1.pt")  # to make room for the next one
    vm.save("metrics.json", b"{2}", made=2)
    vm.bring()
    for _ in range(2):
        assert vm.prove() == []
    whole = {"1.pt": b"1" * LARGE, "metrics.json": b"{}"}
    assert restored(vm, tmp_path / "a") == whole
    vm.save("2.pt", b"2" * LARGE, made=3)
    vm.bring()
    assert vm.prove() == [
        *("content", "put 2.pt", "content", "put metrics.json", "put 1.pt", "group of 2"),
    ]
    assert vm.prove() == ["drop 1.pt"]
    assert restored(vm, tmp_path / "b") == {"2.pt": b"2" * LARGE, "metrics.json": b"{2}"}


def test_a_folder_that_was_emptied_is_no_newer_checkpoint(vm: Vm, tmp_path: Path) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.prove()
    vm.remove("1.pt")
    assert vm.bring() == vm.prove() == []
    assert restored(vm, tmp_path / "a") == {"1.pt": b"1.pt"}


def test_a_group_that_takes_the_place_of_another_is_said_in_one_pack_however_small(vm: Vm) -> None:
    for number in (1, 2):
        for name in ("model.pt", "optim.pt"):
            vm.save(name, b"%d" % number + name.encode(), made=number)
        vm.bring()
        with vm.state.transaction():
            vm.checkpoints.prove()
            for _ in range(3):
                said = vm.checkpoints.collect(vm.packs + 1, 1)
                if any(isinstance(message, PutFile) for message in said):
                    assert len(said) == 5
    vm.packs += 1
    assert len(vm.on_remote()) == 2


def test_the_files_of_a_worker_that_knew_no_groups_are_said_with_theirs(
    vm: Vm, tmp_path: Path
) -> None:
    vm.save("1.pt", made=1)
    vm.bring()
    vm.state.run("UPDATE checkpoints SET until = -1")
    vm.state.run("DELETE FROM checkpoint_groups")
    assert restored(vm, tmp_path / "a") == {"1.pt": b"1.pt"}
    vm.restart()
    assert vm.bring() == ["content", "put 1.pt", "group of 1"]
    vm.prove()
    assert vm.safe() == ["1.pt"]


def test_numbers_of_groups_go_on_from_those_of_the_workers_before(vm: Vm) -> None:
    vm.state.run("INSERT INTO remote_groups VALUES (?, 7, 1)", RUN)
    vm.save("1.pt", made=1)
    vm.bring()
    assert [group.number for group in vm.checkpoints.index().groups[RUN]] == [8]
