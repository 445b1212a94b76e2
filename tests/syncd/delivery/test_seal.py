"""What someone who can write to the remote, and has no key, gets from it: nothing, counted."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from places import Place
from talkers import FOLDER, KEY, Cast, Talker

from protocol.messages import DropFile, Hello, encode_messages
from protocol.wire import KEY_BYTES, Kind, ObjectName, Role, Sealer, Writer
from syncd.delivery.peers import FencedError
from syncd.delivery.refusals import Refusals
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

OTHER = secrets.token_bytes(KEY_BYTES)
HELLO = Hello(host="evil", version="0", time=0.0)
FORGED = encode_messages([HELLO, DropFile(path="forged")])


@pytest.fixture
def cast(tmp_path: Path, rclone: Rclone) -> Iterator[Cast]:
    root = tmp_path / "remote"
    root.mkdir()
    cast = Cast(Place(RcloneRemote(rclone, str(root)), rclone, root, None), tmp_path)
    yield cast
    for talker in cast.talkers:
        talker.state.close()


def put(folder: Path, name: ObjectName, body: bytes) -> None:
    """Place an object, under the name that makes it whole."""
    folder.mkdir(exist_ok=True)
    whole = replace(name, length=len(body), sha256=hashlib.sha256(body).hexdigest())
    (folder / str(whole)).write_bytes(body)


def objects(folder: Path) -> list[tuple[ObjectName, bytes]]:
    """A folder's objects in order, as an attacker may keep them."""
    named = ((ObjectName.parse(path.name), path) for path in sorted(folder.iterdir()))
    return [(name, path.read_bytes()) for name, path in named if name is not None]


def sealed(by: Sealer, writer: Writer, kind: Kind, seq: int) -> tuple[ObjectName, bytes]:
    return by.seal(writer, kind, seq, FORGED)


Attack = Callable[[Talker, Talker, int], None]


def another_key(victim: Talker, reader: Talker, seq: int) -> None:
    by = Sealer(folder=FOLDER, key=OTHER)
    put(victim.folder, *sealed(by, victim.link.writer, Kind.PACK, seq))


def no_key(victim: Talker, reader: Talker, seq: int) -> None:
    for folder in (FOLDER, "unsealed"):
        by = Sealer(folder=folder)
        put(victim.folder, *sealed(by, victim.link.writer, Kind.PACK, seq))


def another_folder(victim: Talker, reader: Talker, seq: int) -> None:
    by = Sealer(folder="beef", key=KEY)
    put(victim.folder, *sealed(by, victim.link.writer, Kind.PACK, seq))


def reflected(victim: Talker, reader: Talker, seq: int) -> None:
    """The reader's own object, presented as the other end's."""
    name, body = objects(reader.folder)[0]
    put(victim.folder, replace(name, seq=seq), body)
    told = body.replace(str(reader.link.writer).encode(), str(victim.link.writer).encode())
    put(victim.folder, replace(name, seq=seq), told)


def replayed_under_another_number(victim: Talker, reader: Talker, seq: int) -> None:
    name, body = objects(victim.folder)[-1]
    put(victim.folder, replace(name, seq=seq), body)
    told = body.replace(f'"seq":{name.seq},'.encode(), f'"seq":{seq},'.encode())
    put(victim.folder, replace(name, seq=seq), told)


def replayed_as_another_kind(victim: Talker, reader: Talker, seq: int) -> None:
    """A pack as a state, and a chunk as a pack."""
    name, body = objects(victim.folder)[-1]
    told = body.replace(b'"kind":"pack"', b'"kind":"state"')
    put(victim.folder, replace(name, kind=Kind.STATE, seq=seq + 5), told)
    chunk, body = victim.link.keys.sealer.seal(victim.link.writer, Kind.CHUNK, seq, FORGED)
    put(victim.folder, replace(chunk, kind=Kind.PACK), body)


def moved_to_another_epoch(victim: Talker, reader: Talker, seq: int) -> None:
    """Everything that the writer said, as that of a successor of its own."""
    writer = victim.link.writer
    newer = replace(writer, epoch=writer.epoch + 1)
    for name, body in objects(victim.folder):
        put(victim.root / str(newer), name, body)
        told = body.replace(str(writer).encode(), str(newer).encode())
        put(victim.root / str(newer), name, told)


def truncated(victim: Talker, reader: Talker, seq: int) -> None:
    """Cut short, and named so that it is whole."""
    by = Sealer(folder=FOLDER, key=OTHER)
    name, body = sealed(by, victim.link.writer, Kind.PACK, seq)
    for length in (1, len(body) // 2, len(body) - 1):
        put(victim.folder, name, body[:length])


def altered(victim: Talker, reader: Talker, seq: int) -> None:
    """A true object with one bit changed in its payload, for the number that comes next."""
    name, body = objects(victim.folder)[-1]
    changed = bytearray(body)
    changed[-2] ^= 1
    put(victim.folder, replace(name, seq=seq), bytes(changed))


ATTACKS = [
    another_key,
    no_key,
    another_folder,
    reflected,
    replayed_under_another_number,
    replayed_as_another_kind,
    moved_to_another_epoch,
    truncated,
    altered,
]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_sealed_for_its_place_is_refused_counted_and_in_nobodys_way(
    cast: Cast, attack: Attack, role: Role
) -> None:
    """In both directions: `role` is the end whose objects are forged."""
    victim, reader = cast.opened(role), cast.opened(role.peer)
    victim.say("a", "b")
    reader.say("x")
    assert reader.listen() == ["a", "b"]
    attack(victim, reader, victim.link.last_seq() + 1)
    assert reader.listen() == ["a", "b"]
    refused = reader.link.refusals.count
    assert refused > 0
    assert reader.link.peers.newest() == victim.link.writer
    victim.say("c")
    assert reader.listen() == ["a", "b", "c"]
    assert reader.link.refusals.count == refused


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_fresh_end_is_not_misled_either(cast: Cast, attack: Attack, role: Role) -> None:
    """One that has read nothing yet, after the packs were put into a state."""
    victim, reader = cast.opened(role), cast.opened(role.peer)
    victim.say("a", "b")
    reader.say("x")
    attack(victim, reader, 1)
    attack(victim, reader, 2)
    state(victim)
    attack(victim, reader, 1)
    victim.say("c")
    fresh = cast.opened(role.peer)
    fresh.listen()
    assert fresh.heard_from(role) == ["a", "b", "c"]
    assert fresh.heard_from(role.peer) == ["x"]
    assert fresh.link.peers.newest() == victim.link.writer
    successor = cast.opened(role)
    assert successor.heard_from(role) == ["a", "b", "c"]


def state(talker: Talker) -> None:
    """Have an end put a state in the place of its packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncd.delivery.link.STATE_PACKS", 1)
        assert talker.link.compact()


def test_old_objects_that_come_back_after_they_were_compacted_away_do_nothing(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b")
    assert vm.listen() == ["a", "b"]
    old = objects(laptop.folder)
    state(laptop)
    laptop.say("c")
    for name, body in old:
        put(laptop.folder, name, body)
    assert vm.listen() == ["a", "b", "c"]
    fresh = cast.opened(Role.WORKER)
    assert fresh.listen() == ["a", "b", "c"]


def test_an_older_state_that_comes_back_does_not_take_back_what_came_after(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    state(laptop)
    old = objects(laptop.folder)
    laptop.say("b")
    state(laptop)
    for name, body in old:
        put(laptop.folder, name, body)
    assert vm.listen() == ["a", "b"]
    assert vm.listen() == ["a", "b"]


def test_objects_that_were_exchanged_are_refused_and_the_true_ones_taken_when_they_return(
    cast: Cast,
) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b")
    kept = objects(laptop.folder)[1:]
    for name, _ in kept:
        (laptop.folder / str(name)).unlink()
    (first, one), (second, two) = kept
    put(laptop.folder, first, two)
    put(laptop.folder, second, one)
    assert vm.listen() == []
    assert vm.link.refusals.count == 1  # the one that would be next
    put(laptop.folder, first, one)
    put(laptop.folder, second, two)
    assert vm.listen() == ["a", "b"]


def test_a_writer_of_the_same_role_that_another_key_seals_fences_nobody(cast: Cast) -> None:
    laptop = cast.opened(Role.CONTROLLER)
    by = Sealer(folder=FOLDER, key=OTHER)
    newer = Writer(laptop.link.writer.epoch + 1, "ffffffff", Role.CONTROLLER)
    put(laptop.root / str(newer), *sealed(by, newer, Kind.PACK, 1))
    laptop.link.discover()
    true = Sealer(folder=FOLDER, key=KEY)
    put(laptop.root / str(newer), *sealed(true, newer, Kind.PACK, 1))
    with pytest.raises(FencedError):
        laptop.link.discover()


class Counting(RcloneRemote):
    """A remote that counts what it is asked for."""

    def __init__(self, rclone: Rclone, fs: str) -> None:
        super().__init__(rclone, fs)
        self.reads = self.lists = 0

    def read(self, path: str, *, limit: int) -> bytes:
        self.reads += 1
        return super().read(path, limit=limit)

    def list(self, folder: str):  # type: ignore[no-untyped-def]
        self.lists += 1
        return super().list(folder)


def test_a_flood_of_garbage_costs_each_later_look_nothing(cast: Cast, rclone: Rclone) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    assert vm.listen() == ["a"]
    by = Sealer(folder=FOLDER, key=OTHER)
    for number in range(40):
        for kind in (Kind.PACK, Kind.STATE):
            payload = encode_messages([DropFile(path=str(number))])
            put(laptop.folder, *by.seal(laptop.link.writer, kind, 3, payload))
        stranger = Writer(number, f"{number:08x}", Role.CONTROLLER)
        put(laptop.root / str(stranger), *sealed(by, stranger, Kind.PACK, 1))
    # Of the right length, and of other bytes than its name says: it may be arriving.
    name, body = by.seal(laptop.link.writer, Kind.PACK, 3, FORGED)
    (laptop.folder / str(name)).write_bytes(bytes(len(body)))
    vm.link.refusals = Refusals(lambda: 0.0)  # a clock that stands: nothing is due again
    counting = vm.link.remote = Counting(rclone, str(laptop.root))
    for _ in range(8):
        vm.link.discover(thorough=False)
        vm.link.pull()
    assert vm.link.refusals.count == 120
    counting.reads = counting.lists = 0
    for _ in range(8):
        vm.link.discover(thorough=False)
        vm.link.pull()
    assert counting.reads == 0
    assert counting.lists == 16  # the root, and the folder of the one that is known
    laptop.say("b")
    assert vm.listen() == ["a", "b"]
    assert vm.link.refusals.count == 120


def test_a_writer_that_says_hello_late_is_found_in_a_flood_of_strangers(cast: Cast) -> None:
    vm = cast.opened(Role.WORKER)
    laptop = cast.new(Role.CONTROLLER)
    by = Sealer(folder=FOLDER, key=OTHER)
    late = Writer(1, "ffffffff", Role.CONTROLLER)
    put(vm.root / str(late), *sealed(by, late, Kind.STATE, 0))
    put(vm.root / str(late), *sealed(by, late, Kind.PACK, 1))
    vm.link.discover(thorough=False)
    assert vm.link.peers.newest() is None
    laptop.state.put("writer", str(late))
    laptop.state.put("seq", 0)
    laptop.state.put("chunk_seq", 0)
    laptop.link.open()
    laptop.say("a")
    vm.link.discover(thorough=False)
    assert vm.link.peers.newest() == late
    assert vm.listen() == ["a"]
