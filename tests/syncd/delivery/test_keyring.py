"""A rotation on the wire: what each key opens, and when the one that is replaced opens no more."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place
from talkers import FOLDER, KEY, Cast, Talker

from protocol.messages import DropFile, Hello, Piece, encode_messages
from protocol.wire import KEY_BYTES, Kind, ObjectName, Role, Sealer, Writer
from syncd.delivery.keyring import mark
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import NotFound, RcloneRemote

NEW = secrets.token_bytes(KEY_BYTES)
OLD_SEALER = Sealer(folder=FOLDER, key=KEY)
NEW_SEALER = Sealer(folder=FOLDER, key=NEW)
FORGED = encode_messages([Hello(host="evil", version="0", time=0.0), DropFile(path="forged")])


@pytest.fixture
def cast(tmp_path: Path, rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cast]:
    monkeypatch.setattr("syncd.delivery.link.ACK_SECONDS", 0.0)
    root = tmp_path / "remote"
    root.mkdir()
    cast = Cast(Place(RcloneRemote(rclone, str(root)), rclone, root, None), tmp_path)
    yield cast
    for talker in cast.talkers:
        talker.state.close()


def forge(folder: Path, writer: Writer, kind: Kind, seq: int, by: Sealer = OLD_SEALER) -> None:
    folder.mkdir(exist_ok=True)
    name, body = by.seal(writer, kind, seq, FORGED)
    (folder / str(name)).write_bytes(body)


def is_new(folder: Path) -> bool:
    """Whether all packs and states of a folder are sealed by the new key."""
    writer = Writer.parse(folder.name)
    assert writer is not None
    for path in folder.iterdir():
        name = ObjectName.parse(path.name)
        assert name is not None
        if name.kind is not Kind.CHUNK:
            assert Sealer.open(NEW_SEALER, writer, name, path.read_bytes()) is not None
    return True


def step(*talkers: Talker) -> None:
    """Let ends push, read, and put states, until nothing moves."""
    for _ in range(4):
        for talker in talkers:
            while talker.link.push():
                pass
            talker.listen()
            talker.link.compact()


def settled(cast: Cast) -> tuple[Talker, Talker]:
    """Both ends, each of which has heard the other."""
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    vm.say("x")
    step(laptop, vm)
    assert (vm.listen(), laptop.listen()) == (["a"], ["x"])
    return laptop, vm


def test_an_end_with_a_new_key_says_all_again_at_once_under_it(cast: Cast) -> None:
    laptop, _ = settled(cast)
    assert not laptop.link.compact()
    laptop = cast.rekeyed(laptop, NEW, KEY)
    assert laptop.link.compact()
    assert is_new(laptop.folder)
    assert not laptop.link.compact()


def test_both_ends_go_over_one_after_the_other_and_then_the_old_key_is_dropped(cast: Cast) -> None:
    laptop, vm = settled(cast)
    laptop = cast.rekeyed(laptop, NEW, KEY)
    laptop.say("b")
    vm.say("y")
    step(laptop, vm)
    assert laptop.listen() == ["x", "y"]  # the worker still seals by the old one
    assert vm.listen() == ["a"]  # and cannot open the new one: nothing moves
    assert vm.link.refusals.count > 0
    assert not laptop.link.is_rotated()
    vm = cast.rekeyed(vm, NEW, KEY)
    vm.say("z")
    assert vm.listen() == ["a", "b"]
    step(laptop, vm)
    assert laptop.listen() == ["x", "y", "z"]
    assert laptop.link.is_rotated()
    assert vm.link.is_rotated()
    assert is_new(laptop.folder)
    assert is_new(vm.folder)


@pytest.mark.parametrize("retired", [True, False], ids=["retired", "not retired yet"])
def test_the_old_key_forges_nothing_once_the_new_one_was_seen(cast: Cast, retired: bool) -> None:
    laptop, vm = settled(cast)
    laptop = cast.rekeyed(laptop, NEW, KEY)
    vm = cast.rekeyed(vm, NEW, KEY)
    step(laptop, vm)
    assert vm.link.is_rotated()
    if retired:
        vm.link.keys.retire()
    writer = laptop.link.writer
    newer = Writer(writer.epoch + 5, "00000000", Role.CONTROLLER)
    forge(laptop.folder, writer, Kind.PACK, laptop.link.last_seq() + 1)
    forge(laptop.folder, writer, Kind.STATE, laptop.link.last_seq() + 3)
    forge(laptop.root / str(newer), newer, Kind.PACK, 1)
    assert vm.listen() == ["a"]
    assert vm.link.refusals.count == 3
    assert vm.link.peers.newest() == writer
    laptop.say("b")
    assert vm.listen() == ["a", "b"]


def test_a_retired_key_stays_so_after_a_restart_whatever_the_file_says(cast: Cast) -> None:
    laptop, vm = settled(cast)
    laptop, vm = cast.rekeyed(laptop, NEW, KEY), cast.rekeyed(vm, NEW, KEY)
    step(laptop, vm)
    vm.link.keys.retire()
    assert cast.rekeyed(vm, NEW, KEY).link.keys.previous is None
    assert cast.rekeyed(vm, secrets.token_bytes(KEY_BYTES), NEW).link.keys.previous is not None


def test_a_fresh_worker_in_the_middle_takes_over_what_the_lost_one_sealed_by_the_old_key(
    cast: Cast,
) -> None:
    laptop, lost = settled(cast)
    lost.say("y")
    laptop = cast.rekeyed(laptop, NEW, KEY)
    assert laptop.link.compact()
    fresh = cast.opened(Role.WORKER, NEW, KEY)
    assert fresh.heard_from(Role.WORKER) == ["x", "y"]
    fresh.said = ["x", "y"]
    assert not fresh.link.compact()  # the laptop may not have read the lost one to its end
    assert not laptop.link.is_rotated()
    fresh.say("z")
    laptop.listen()
    assert not laptop.link.is_rotated()  # what the lost one left is still needed
    step(laptop, fresh)
    assert laptop.link.is_rotated()
    assert fresh.link.is_rotated()
    assert not lost.folder.exists()
    last = cast.opened(Role.WORKER, NEW)
    assert last.heard_from(Role.WORKER) == ["x", "y", "z"]


def test_a_chunk_of_the_old_key_is_read_where_a_sealed_message_names_it(cast: Cast) -> None:
    laptop, vm = settled(cast)
    name = laptop.link.put_chunk(b"0123456789")
    vm = cast.rekeyed(vm, NEW)
    assert list(vm.link.read_pieces([Piece(object=name, offset=2, length=3)])) == [b"234"]
    path = laptop.root / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match="not whole"):
        list(vm.link.read_pieces([Piece(object=name, offset=2, length=3)]))


def test_packs_that_wait_to_be_sent_go_first_and_lose_nothing(cast: Cast) -> None:
    laptop, vm = settled(cast)
    laptop.words.append("b")
    assert laptop.link._make_pack()
    laptop = cast.rekeyed(laptop, NEW, KEY)
    assert not laptop.link.compact()
    laptop.words.append("c")
    step(laptop)
    assert is_new(laptop.folder)
    vm = cast.rekeyed(vm, NEW, KEY)
    assert vm.listen()[-2:] == ["b", "c"]


@pytest.mark.parametrize("at", range(6))
def test_a_crash_between_any_two_steps_of_saying_all_again_leaves_it_to_be_done(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The n-th write to the remote or to the state fails; the end is started again."""
    laptop, vm = settled(cast)
    laptop = cast.rekeyed(laptop, NEW, KEY)
    steps = iter(range(at, -1, -1))

    def failing(name: str, of: object) -> None:
        true = getattr(of, name)

        def call(*args: object, **kwargs: object) -> object:
            if next(steps, 1) == 0:
                raise NotFound("crash", why="here")
            return true(*args, **kwargs)

        monkeypatch.setattr(of, name, call)

    with monkeypatch.context():
        for name, of in (
            ("upload", laptop.link.remote),
            ("delete", laptop.link.remote),
            ("put", laptop.state),
        ):
            failing(name, of)
        with contextlib.suppress(NotFound):
            laptop.link.compact()
    monkeypatch.undo()
    laptop = cast.rekeyed(laptop, NEW, KEY)
    laptop.say("b")
    vm = cast.rekeyed(vm, NEW, KEY)
    step(laptop, vm)
    assert vm.listen()[-1] == "b"
    assert laptop.link.is_rotated()
    assert is_new(laptop.folder)


def test_a_mark_tells_keys_apart_and_nothing_of_them() -> None:
    assert mark(OLD_SEALER) != mark(NEW_SEALER)
    assert mark(OLD_SEALER) == mark(Sealer(folder="other", key=KEY))
    assert mark(OLD_SEALER) not in KEY.hex()
    assert mark(Sealer(folder=FOLDER)) == ""
