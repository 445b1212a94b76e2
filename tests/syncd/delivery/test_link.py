"""The link over real remotes: what is applied, in which order, and what is refused."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place
from talkers import FOLDER, KEY, Cast

from protocol.errors import RefusedError
from protocol.messages import Append, DropFile, Message, Piece, encode_messages
from protocol.wire import KEY_BYTES, Kind, ObjectName, Role, Sealer, Writer
from syncd.delivery.link import ACK_PACKS, ACK_SECONDS, LITTLE_BYTES, Link
from syncd.delivery.peers import FencedError
from syncd.rclone.remote import NotFound


@pytest.fixture
def cast(place: Place, tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(place, tmp_path)
    yield cast
    for talker in cast.talkers:
        talker.state.close()


def test_words_are_heard_once_and_in_order_by_both_ends(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b")
    vm.say("x")
    assert vm.listen() == ["a", "b"]
    assert laptop.listen() == ["x"]
    laptop.say("c")
    assert vm.listen() == vm.listen() == ["a", "b", "c"]


def test_a_pack_that_is_missing_holds_up_those_after_it(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b", "c")
    second = sorted(laptop.folder.iterdir())[2]
    away = second.rename(cast.folder / "away")
    assert vm.listen() == ["a"]
    away.rename(second)
    assert vm.listen() == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["cut short", "empty", "other bytes"])
def test_a_torn_pack_is_waited_for(cast: Cast, damage: str) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b")
    path = sorted(laptop.folder.iterdir())[2]
    whole = path.read_bytes()
    path.write_bytes(
        {"cut short": whole[:-1], "empty": b"", "other bytes": b"x" * len(whole)}[damage]
    )
    assert vm.listen() == ["a"]
    path.write_bytes(whole)
    assert vm.listen() == ["a", "b"]


def test_a_forged_pack_is_counted_and_does_not_keep_the_true_one_away(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    forger = Sealer(folder=FOLDER, key=secrets.token_bytes(KEY_BYTES))
    payload = encode_messages([DropFile(path="forged")])
    name, body = forger.seal(laptop.link.writer, Kind.PACK, 3, payload)
    (laptop.folder / str(name)).write_bytes(body)
    assert vm.listen() == ["a"]
    assert "the seal does not fit" in vm.link.refusals.last
    laptop.say("b")
    assert vm.listen() == ["a", "b"]


def test_a_reflected_or_moved_object_is_refused(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    vm.say("x")
    original = next(vm.folder.iterdir())
    name = ObjectName.parse(original.name)
    assert name is not None
    reflected = str(ObjectName(3, name.kind, name.length, name.sha256))
    (laptop.folder / reflected).write_bytes(original.read_bytes())
    assert vm.listen() == ["a"]
    assert vm.link.refusals.count == 1


def test_a_writer_without_a_valid_hello_counts_for_nothing(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    stranger = cast.new(Role.CONTROLLER, secrets.token_bytes(KEY_BYTES))
    stranger.state.put("writer", "c-999999-00000000")
    stranger.state.put("seq", 0)
    stranger.say("evil")
    assert vm.listen() == ["a"]
    assert vm.link.peers.newest() == laptop.link.writer
    laptop.say("b")
    assert vm.listen() == ["a", "b"]


def test_a_successor_reads_its_predecessor_and_fences_it(cast: Cast) -> None:
    laptop, old = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    old.say("x", "y")
    new = cast.opened(Role.WORKER)
    assert [word for _, word in new.heard] == ["x", "y"]
    assert new.link.writer > old.link.writer
    new.say("z")
    old.say("too late")
    assert laptop.listen() == ["x", "y", "z"]
    with pytest.raises(FencedError, match="has taken over"):
        old.link.discover()


def test_what_a_predecessor_sent_before_it_could_see_its_successor_counts(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, old, new = (
        cast.opened(Role.CONTROLLER),
        cast.opened(Role.WORKER),
        cast.new(Role.WORKER),
    )
    old.say("x")
    send = new.link._send_packs

    def late() -> None:
        if len(old.said) == 1:
            old.say("y")
        send()

    monkeypatch.setattr(new.link, "_send_packs", late)
    new.link.open()
    assert [word for _, word in new.heard] == ["x", "y"]
    new.say("z")
    old.say("too late")
    assert laptop.listen() == ["x", "y", "z"]


def test_a_reader_that_saw_only_the_first_hello_still_takes_all_that_counts(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, old, new = (
        cast.opened(Role.CONTROLLER),
        cast.opened(Role.WORKER),
        cast.new(Role.WORKER),
    )
    old.say("x")
    send = new.link._send_packs

    def late() -> None:
        old.say("y")
        send()
        monkeypatch.undo()
        assert laptop.listen() == ["x"]
        raise NotFound("a crash", path="here", why="it was killed")

    monkeypatch.setattr(new.link, "_send_packs", late)
    with pytest.raises(NotFound):
        new.link.open()
    assert not new.link.joined
    new.link.open()
    assert new.link.joined
    new.say("z")
    assert laptop.listen() == ["x", "y", "z"]


def test_a_pack_is_confirmed_once_nobody_was_there_after_it(cast: Cast) -> None:
    old = cast.opened(Role.WORKER)
    old.say("claim")
    seq = old.link.last_seq()
    assert not old.link.confirmed(seq)
    old.link.discover()
    assert old.link.confirmed(seq)
    old.say("another")
    cast.opened(Role.WORKER)
    with pytest.raises(FencedError):
        old.link.discover()
    assert not old.link.confirmed(old.link.last_seq())


def test_a_hello_that_cannot_be_read_yet_confirms_nothing(cast: Cast) -> None:
    old, new = cast.opened(Role.WORKER), cast.opened(Role.WORKER)
    old.say("claim")
    hello = next(new.folder.iterdir())
    whole = hello.read_bytes()
    hello.write_bytes(b"x" * len(whole))
    old.link.discover()
    assert not old.link.confirmed(old.link.last_seq())
    hello.write_bytes(whole)
    with pytest.raises(FencedError):
        old.link.discover()


def test_the_other_ends_acknowledgement_of_a_successor_fences(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.ACK_SECONDS", 0.0)
    laptop, old, new = (
        cast.opened(Role.CONTROLLER),
        cast.opened(Role.WORKER),
        cast.opened(Role.WORKER),
    )
    new.say("x")
    laptop.listen()
    laptop.say("a")
    shutil.move(new.folder, cast.folder / "not listed")
    old.link.discover()
    with pytest.raises(FencedError, match=str(new.link.writer)):
        old.link.pull()


def test_a_predecessor_that_was_heard_and_cannot_be_read_is_named(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.ACK_SECONDS", 0.0)
    laptop, old = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    old.say("x", "y")
    laptop.listen()
    laptop.say("a")
    last = sorted(old.folder.iterdir())[-1]
    away = last.rename(cast.folder / "deleted")
    new = cast.opened(Role.WORKER)
    new.listen()
    assert new.link.peers.unread() == [old.link.writer]
    away.rename(last)
    third = cast.opened(Role.WORKER)
    third.listen()
    assert third.link.peers.unread() == [old.link.writer]  # it was not the third's to read


def test_a_state_takes_the_place_of_packs(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 5)
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say(*"abcdef")
    assert laptop.link.compact()
    assert [ObjectName.parse(p.name).kind for p in laptop.folder.iterdir()] == [Kind.STATE]  # type: ignore[union-attr]
    laptop.say("g")
    assert vm.listen() == list("abcdefg")
    fresh = cast.opened(Role.WORKER)
    assert fresh.listen() == list("abcdefg")
    assert not laptop.link.compact()


def test_a_predecessor_stays_until_the_other_end_has_read_what_counts_of_it(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only until it has heard of the successor: it may be killed between the two."""
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 3)
    laptop, old = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    old.say("x")
    assert laptop.listen() == ["x"]
    old.say("y", "z")
    new = cast.opened(Role.WORKER)
    new.say(*"abcd")
    # As far as the new one's hello: what is left of the old one comes next.
    laptop.link.discover()
    assert laptop.link._pull_writer(new.link.writer, 1, None)
    laptop.say("to be acknowledged along with")
    new.listen()
    new.say(*"efgh")
    new.link.compact()
    assert laptop.listen()[:3] == ["x", "y", "z"]
    laptop.say("again")
    new.listen()
    new.say(*"ijkl")
    assert new.link.compact()
    assert not old.folder.exists()


def test_a_predecessor_stays_until_its_successors_last_hello_was_heard(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 3)
    laptop, old, new = (
        cast.opened(Role.CONTROLLER),
        cast.opened(Role.WORKER),
        cast.new(Role.WORKER),
    )
    old.say("x")
    send = new.link._send_packs

    def late() -> None:
        old.say("y")
        send()
        new.link._send_packs = send  # type: ignore[method-assign]
        assert laptop.listen() == ["x"]
        laptop.say("to be acknowledged along with")

    new.link._send_packs = late  # type: ignore[method-assign]
    new.link.open()
    new.listen()
    new.say(*"abcd")
    new.link.compact()
    assert laptop.listen() == ["x", "y", *"abcd"]


@pytest.mark.parametrize("knows", [True, False])
def test_one_that_was_fenced_deletes_nothing_of_its_successor(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 3)
    laptop, old = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    old.say(*"abcd")
    assert laptop.listen() == [*"abcd"]
    laptop.say("acknowledged along with")
    new = cast.opened(Role.WORKER)
    new.say(*"efgh")
    old.listen_while_fenced()
    there = sorted(new.folder.iterdir())
    if not knows:  # in the middle of a round, say, that began before
        monkeypatch.setattr(old.link.peers, "check_fence", lambda: None)
        assert old.link.compact()
    else:
        with pytest.raises(FencedError):
            old.link.compact()
    assert sorted(new.folder.iterdir()) == there
    assert laptop.listen() == [*"abcdefgh"]


def test_what_is_waited_for_is_told_after_a_while(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack between others, and the last ones of a writer that was replaced."""
    laptop, old = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    old.say("x", "y", "z")
    names = sorted(old.folder.iterdir())
    kept = {path: path.read_bytes() for path in names}
    names[2].unlink()
    assert laptop.listen() == ["x"]
    assert laptop.link.waits() == []
    monkeypatch.setattr("syncd.delivery.link.GAP_SECONDS", -1.0)  # as if it were long ago
    assert [each.partition(" for ")[2].split(" for ")[0] for each in laptop.link.waits()] == [
        f"pack 3 of {old.link.writer}"
    ]
    names[2].write_bytes(kept[names[2]])
    new = cast.opened(Role.WORKER)
    new.say("n")
    names[3].unlink()  # somebody has deleted what the new one has read
    assert laptop.listen() == ["x", "y"]
    assert f"pack 4 of {old.link.writer}" in laptop.link.waits()[0]
    names[3].write_bytes(kept[names[3]])
    assert laptop.listen() == ["x", "y", "z", "n"]
    assert laptop.link.waits() == []


def test_a_forged_state_does_not_keep_the_true_one_away(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.STATE_PACKS", 5)
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say(*"abcdef")
    assert laptop.link.compact()
    forger = Sealer(folder=FOLDER, key=secrets.token_bytes(KEY_BYTES))
    name, body = forger.seal(laptop.link.writer, Kind.STATE, 9, encode_messages([]))
    (laptop.folder / str(name)).write_bytes(body)
    assert vm.listen() == list("abcdef")
    assert vm.link.refusals.count == 1


def test_a_pack_that_was_made_is_sent_after_a_restart(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.words.append("a")
    assert laptop.link._make_pack()
    again = Link(
        remote=cast.place.remote,
        state=laptop.state,
        sealer=Sealer(folder=FOLDER, key=KEY),
        role=Role.CONTROLLER,
        scratch=cast.folder,
        outgoing=laptop,
        incoming=laptop,
    )
    again.open()
    assert again.push()
    assert not again.push()
    assert vm.listen() == ["a"]


def test_a_pack_that_arrived_though_its_upload_failed_is_not_sent_again(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second upload that is cut short would take its place."""
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    send, sent = laptop.link.upload, list[str]()

    def upload(name: str, body: bytes) -> None:
        sent.append(name)
        send(name, body)
        if len(sent) == 1:
            raise NotFound("after", path="upload", why="a fault")

    monkeypatch.setattr(laptop.link, "upload", upload)
    with pytest.raises(NotFound):
        laptop.say("a")
    laptop.say("b")
    assert len(sent) == 2
    assert vm.listen() == ["a", "b"]


def test_an_upload_that_is_cut_short_takes_the_place_of_nothing_that_was_read(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that comes late does not show that the first one had arrived."""
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    send, kept = laptop.link.upload, [None, -100]

    def upload(name: str, body: bytes) -> None:
        if not kept:
            send(name, body)
            return
        send(name, body[: kept.pop(0)])
        raise NotFound("after", path="upload", why="a fault")

    monkeypatch.setattr(laptop.link, "upload", upload)
    monkeypatch.setattr(laptop.link, "_surely_whole", set)
    with pytest.raises(NotFound):
        laptop.say("a")
    with pytest.raises(NotFound):
        laptop.link.push()
    assert vm.listen() == ["a"]
    successor = cast.opened(Role.WORKER)
    laptop.say("b")
    assert successor.listen() == ["a", "b"]


def test_a_pack_that_fails_to_be_made_moves_no_cursor(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = cast.opened(Role.CONTROLLER)
    laptop.say("a")

    def fail(seq: int, budget: int) -> list[Message]:
        laptop.state.put("cursor", "moved")
        raise OSError("cannot be read")

    monkeypatch.setattr(laptop, "collect", fail)
    with pytest.raises(OSError, match="cannot be read"):
        laptop.link.push()
    assert laptop.state.get("cursor") is None
    assert laptop.state.get("seq") == 2


def test_an_end_knows_whether_the_other_one_has_heard_it(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.ACK_SECONDS", 0.0)
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    vm.say("x")
    assert not vm.link.is_heard()
    laptop.listen()
    laptop.say("a")
    assert not vm.link.is_heard()
    vm.listen()
    assert vm.link.is_heard()
    vm.link.push()  # what acknowledges is no news, and nobody says that it has heard it
    laptop.listen()
    laptop.link.push()
    vm.listen()
    assert vm.link.is_heard()
    vm.say("y")
    assert not vm.link.is_heard()


def test_an_end_sees_whether_the_remote_has_what_a_successor_needs(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = cast.opened(Role.WORKER)
    vm.say("x", "y")
    assert vm.link.is_kept()
    second = sorted(vm.folder.iterdir())[1]
    away = second.rename(cast.folder / "away")
    assert not vm.link.is_kept()
    away.rename(second)
    chunk = vm.link.put_chunk(b"a part of a file")
    monkeypatch.setattr(vm, "kept_objects", lambda: {chunk})
    assert vm.link.is_kept()
    (cast.place.root / chunk).unlink()
    assert not vm.link.is_kept()


def test_acknowledgements_reach_the_writer_and_cause_none_themselves(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.delivery.link.ACK_SECONDS", 0.0)
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    vm.say("x")
    laptop.say("a", "b")
    vm.listen()
    assert vm.link.push()
    laptop.listen()
    assert laptop.link.acked() == 3
    rounds = 0
    while laptop.link.push() or vm.link.push():
        laptop.listen()
        vm.listen()
        rounds += 1
    assert rounds <= 2


def test_pieces_are_read_back_and_checked(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    name = laptop.link.put_chunk(b"0123456789")
    pieces = [Piece(object=name, offset=2, length=3), Piece(object=name, offset=0, length=1)]
    assert list(vm.link.read_pieces(pieces)) == [b"234", b"0"]
    with pytest.raises(RefusedError, match="outside"):
        list(vm.link.read_pieces([Piece(object=name, offset=8, length=3)]))
    with pytest.raises(RefusedError, match="not the name of a chunk"):
        list(vm.link.read_pieces([Piece(object="../../etc/passwd", offset=0, length=1)]))
    path = cast.place.root / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match="not whole"):
        list(vm.link.read_pieces(pieces))


def test_a_message_of_another_kind_of_end_is_still_handed_on_in_order(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    seen: list[Message] = []
    laptop.apply = lambda writer, message: seen.append(message)  # type: ignore[method-assign]
    append = Append(path="in/a.log", stream="s", start=0, end=3, blob=b"abc")
    vm.collect = lambda seq, budget: [append] if seq == 2 else []  # type: ignore[method-assign]
    assert vm.link.push()
    laptop.listen()
    assert seen[-1] == append


def test_a_message_that_is_refused_does_not_keep_the_next_ones_away(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    heard = vm.apply

    def picky(writer: Writer, message: Message) -> None:
        if isinstance(message, DropFile) and message.path == "bad":
            raise RefusedError("take a word", why="it is bad")
        heard(writer, message)

    vm.apply = picky  # type: ignore[method-assign]
    laptop.say("a", "bad", "b")
    assert vm.listen() == ["a", "b"]
    assert (vm.link.refusals.count, vm.link.refusals.last) == (1, "take a word: it is bad")


def test_an_end_whose_remote_was_emptied_says_everything_again(cast: Cast) -> None:
    laptop = cast.opened(Role.CONTROLLER)
    laptop.say("a", "b")
    shutil.rmtree(laptop.folder)
    laptop.link.open()
    assert laptop.link.compact()
    laptop.say("c")
    vm = cast.opened(Role.WORKER)
    assert vm.listen() == ["a", "b", "c"]


def test_a_small_state_is_made_after_a_few_packs_and_leaves_what_was_not_read_yet(
    cast: Cast,
) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say(*"abcdefg")
    assert vm.listen() == list("abcdefg")
    vm.say("x")
    laptop.listen()
    laptop.say("h", "i")
    assert laptop.link.compact()
    kept = sorted(path.name for path in laptop.folder.iterdir())
    assert [ObjectName.parse(name).kind for name in kept] == [Kind.PACK, Kind.PACK, Kind.STATE]  # type: ignore[union-attr]
    assert vm.listen() == list("abcdefghi")
    assert not laptop.link.compact()
    assert cast.opened(Role.WORKER).listen() == ["x", *"abcdefghi"]  # its predecessor's first


def test_no_state_is_made_early_that_would_repeat_much(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = cast.opened(Role.CONTROLLER)
    monkeypatch.setattr(laptop, "unacked", lambda acked: LITTLE_BYTES + 1, raising=False)
    laptop.say(*"abcdefghij")
    assert not laptop.link.compact()
    monkeypatch.setattr(laptop, "unacked", lambda acked: LITTLE_BYTES)
    assert laptop.link.compact()


def test_an_acknowledgement_goes_along_with_others_or_alone_after_a_while(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.listen()
    assert laptop.link.ack_wait() == 0  # a new writer's, which is what fences the one before
    assert laptop.link.push()
    vm.say("x")
    laptop.listen()
    assert 0 < laptop.link.ack_wait() <= ACK_SECONDS
    assert not laptop.link.push()
    laptop.say("along")
    assert laptop.link.ack_wait() == math.inf
    vm.listen()
    assert vm.link.acked() == vm.link.last_seq()
    vm.say(*map(str, range(ACK_PACKS)))
    laptop.listen()
    assert laptop.link.ack_wait() == 0
