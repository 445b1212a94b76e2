"""Checkpoints of a stage that saves and prunes as it likes, over a line of the test's choice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunks import Chunks

from protocol.errors import RemoteError
from protocol.messages import Content, DropFile, Message, PutFile
from syncd.delivery import checkpoints as module
from syncd.delivery import holds as holds_module
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.chunks import Draft
from syncd.delivery.contents import Contents
from syncd.delivery.files import Found, walk
from syncd.delivery.holds import Holds
from syncd.delivery.proofs import Proofs
from syncd.rclone.profiles import LOCAL, Profile
from syncd.rclone.remote import NotFound, Transient
from syncd.state import State

RUN = "train.0001.7f3a"
FOLDER = f"store/checkpoints/{RUN}"
LARGE = 9 * 1024 * 1024  # a chunk of its own


class Hashing:
    """Stands for a remote that knows the hash of each chunk, unless it is silent."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.silent = False

    def anchor(self) -> Hashing:
        return self

    def profile(self) -> Profile:
        return LOCAL

    def hash_kind(self) -> str:
        return "sha256"

    def hash_of(self, path: str, kind: str) -> str:
        if self.silent or path not in self.chunks.kept:
            raise NotFound("hash", path=path, why="it is not there")
        return hashlib.sha256(self.chunks.kept[path]).hexdigest()


class Line(Chunks):
    """Chunks that go one by one; `before` is what happens meanwhile, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], object] = lambda: None

    def send(self, draft: Draft) -> str:
        try:
            self.before()
        except BaseException:
            draft.discard()
            raise
        return super().send(draft)


class Vm:
    """A worker's checkpoints, with what it says taken down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".syncd" / "held").mkdir(parents=True)
        (root / ".syncd" / "files").mkdir()
        self.state = State(root / ".syncd" / "state.db")
        self.chunks = Line()
        self.remote = Hashing(self.chunks)
        self.contents = Contents(self.state, root / ".syncd" / "files", lambda: self.chunks)
        self.proofs = Proofs(self.state, lambda: self.remote, root / ".syncd", lambda: 0.0)
        self.over = False
        self.packs = 0
        self.restart()

    def restart(self) -> None:
        self.holds = Holds(self.root / ".syncd" / "held")
        self.checkpoints = Checkpoints(
            state=self.state,
            root=self.root,
            contents=self.contents,
            proofs=self.proofs,
            holds=self.holds,
            is_over=lambda run: self.over,
            sent=lambda: self.packs,
            make_again=lambda lost: self.checkpoints.send_again(self.contents.lose(lost)),
        )

    def save(self, name: str, data: bytes = b"", *, made: int) -> Path:
        path = self.root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data or name.encode())
        os.utime(temporary, (made, made))
        return temporary.replace(path)

    def remove(self, name: str) -> None:
        (self.root / FOLDER / name).unlink()

    def found(self) -> list[Found]:
        return list(walk(self.root, FOLDER, {}))

    def bring(self) -> list[str]:
        """Bring away what there is; return what is said of it."""
        self.checkpoints.bring(self.found(), lambda path: False)
        return self.say()

    def say(self) -> list[str]:
        with self.state.transaction():
            messages = self.checkpoints.collect(self.packs + 1, 10**6)
        self.packs += bool(messages)
        return [told(message) for message in messages]

    def prove(self) -> list[str]:
        self.checkpoints.prove()
        return self.say()

    def safe(self) -> list[str]:
        found = self.checkpoints.index().runs.get(RUN, ())
        return [file.path for file in found if file.safe is not None]

    def on_remote(self) -> set[str]:
        """What a fresh worker would find: by what a state would say."""
        said = [m for m in self.checkpoints.restate() if isinstance(m, PutFile)]
        return {Path(message.path).name for message in said}

    def held(self) -> list[str]:
        return sorted(path.name for path in (self.root / ".syncd" / "held").iterdir())


def told(message: Message) -> str:
    if isinstance(message, Content):
        return "content"
    assert isinstance(message, PutFile | DropFile)
    return f"{message.type} {Path(message.path).name}"


@pytest.fixture
def vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    vm = Vm(tmp_path)
    yield vm
    vm.state.close()


def test_a_checkpoint_is_safe_once_its_bytes_are_proved(vm: Vm) -> None:
    vm.save("1.pt", made=1)
    assert vm.bring() == ["content", "put 1.pt"]
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
    assert vm.bring() == ["content", "put 1.pt"]
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
    assert vm.bring() == ["content", "put 2.pt"]
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
    assert vm.prove() == ["content", "put latest.pt"]
    assert [file.sha256 for file in vm.checkpoints.index().runs[RUN]] == [
        hashlib.sha256(b"two").hexdigest()
    ]


def test_a_checkpoint_that_is_pruned_on_its_way_arrives(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)
    vm.chunks.before = lambda: vm.remove("1.pt") if vm.found() else None
    assert vm.bring() == ["content", "put 1.pt"]
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
    assert vm.bring() == ["content", "put 3.pt", "content", "put 2.pt"]
    assert len(vm.chunks.kept) == 2


def test_one_that_was_on_its_way_when_the_line_broke_goes_on_although_it_is_pruned(vm: Vm) -> None:
    vm.save("1.pt", b"1" * LARGE, made=1)

    def fail() -> None:
        raise Transient("send", why="the line is down")

    vm.chunks.before = fail
    with pytest.raises(RemoteError):
        vm.bring()
    vm.remove("1.pt")
    vm.save("2.pt", made=2)
    vm.chunks.before = lambda: None
    assert vm.bring() == ["content", "put 1.pt"]
    vm.prove()
    assert vm.bring() == ["content", "put 2.pt"]
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
