"""The link over real remotes: what is applied, in which order, and what is refused."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from places import Place

from protocol.errors import RefusedError
from protocol.messages import Append, Grant, Message, Piece, encode_messages
from protocol.wire import KEY_BYTES, Kind, ObjectName, Role, Sealer, Writer
from syncd.delivery.link import FencedError, Link
from syncd.state import State

KEY = secrets.token_bytes(KEY_BYTES)
FOLDER = "f0"


class Talker:
    """An end that says words, one in a message, and remembers those it heard."""

    def __init__(self, place: Place, folder: Path, role: Role, key: bytes = KEY) -> None:
        folder.mkdir()
        self.words: list[str] = []
        self.said: list[str] = []
        self.heard: list[tuple[str, str]] = []
        self.root = place.root
        self.state = State(folder / "state.db")
        self.link = Link(
            remote=place.remote,
            state=self.state,
            sealer=Sealer(folder=FOLDER, key=key),
            role=role,
            scratch=folder,
            outgoing=self,
            incoming=self,
        )

    def say(self, *words: str) -> None:
        """Send each word in a pack of its own."""
        for word in words:
            self.words.append(word)
            while self.link.push():
                pass

    def listen(self) -> list[str]:
        """Read everything; return the words that were heard so far."""
        self.link.discover()
        while self.link.pull():
            pass
        return [word for _, word in self.heard]

    @property
    def folder(self) -> Path:
        return self.root / str(self.link.writer)

    def collect(self, seq: int, budget: int) -> list[Message]:
        words, self.words = self.words, []
        self.said += words
        return [Grant(writer=word) for word in words]

    def apply(self, writer: Writer, message: Message) -> None:
        if isinstance(message, Grant):
            self.heard.append((str(writer), message.writer))

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        self.heard = [(w, word) for w, word in self.heard if w != str(writer)]

    def pack_up(self, acked: int) -> None:
        return

    def restate(self) -> list[Message]:
        return [Grant(writer=word) for word in self.said]

    def kept_objects(self) -> set[str]:
        return set()


class Cast:
    """Makes talkers, and closes what they opened."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.talkers: list[Talker] = []

    def new(self, role: Role, key: bytes = KEY) -> Talker:
        name = f"{role}-{len(self.talkers)}"
        self.talkers.append(Talker(self.place, self.folder / name, role, key))
        return self.talkers[-1]

    def opened(self, role: Role) -> Talker:
        talker = self.new(role)
        talker.link.open()
        return talker


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
    second = sorted(laptop.folder.iterdir())[1]
    away = second.rename(cast.folder / "away")
    assert vm.listen() == ["a"]
    away.rename(second)
    assert vm.listen() == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["cut short", "empty", "other bytes"])
def test_a_torn_pack_is_waited_for(cast: Cast, damage: str) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a", "b")
    path = sorted(laptop.folder.iterdir())[1]
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
    payload = encode_messages([Grant(writer="forged")])
    name, body = forger.seal(laptop.link.writer, Kind.PACK, 2, payload)
    (laptop.folder / str(name)).write_bytes(body)
    assert vm.listen() == ["a"]
    assert "the seal does not fit" in next(iter(vm.link.refused.values()))
    laptop.say("b")
    assert vm.listen() == ["a", "b"]


def test_a_reflected_or_moved_object_is_refused(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    vm.say("x")
    original = next(vm.folder.iterdir())
    name = ObjectName.parse(original.name)
    assert name is not None
    reflected = str(ObjectName(2, name.kind, name.length, name.sha256))
    (laptop.folder / reflected).write_bytes(original.read_bytes())
    assert vm.listen() == ["a"]
    assert len(vm.link.refused) == 1


def test_a_writer_without_a_valid_hello_counts_for_nothing(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    laptop.say("a")
    stranger = cast.new(Role.CONTROLLER, secrets.token_bytes(KEY_BYTES))
    stranger.state.put("writer", "c-999999-00000000")
    stranger.state.put("seq", 0)
    stranger.say("evil")
    assert vm.listen() == ["a"]
    assert vm.link.peer() == laptop.link.writer
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
    assert len(vm.link.refused) == 1


def test_a_pack_that_was_made_is_sent_after_a_restart_under_its_name(cast: Cast) -> None:
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
    assert laptop.state.get("seq") == 1


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
    assert laptop.link.acked() == 2
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
    vm.collect = lambda seq, budget: [append] if seq == 1 else []  # type: ignore[method-assign]
    assert vm.link.push()
    laptop.listen()
    assert seen[-1] == append


def test_a_message_that_is_refused_does_not_keep_the_next_ones_away(cast: Cast) -> None:
    laptop, vm = cast.opened(Role.CONTROLLER), cast.opened(Role.WORKER)
    heard = vm.apply

    def picky(writer: Writer, message: Message) -> None:
        if isinstance(message, Grant) and message.writer == "bad":
            raise RefusedError("take a word", why="it is bad")
        heard(writer, message)

    vm.apply = picky  # type: ignore[method-assign]
    laptop.say("a", "bad", "b")
    assert vm.listen() == ["a", "b"]
    assert list(vm.link.refused.values()) == ["take a word: it is bad"]


def test_an_end_whose_remote_was_emptied_says_everything_again(cast: Cast) -> None:
    laptop = cast.opened(Role.CONTROLLER)
    laptop.say("a", "b")
    shutil.rmtree(laptop.folder)
    laptop.link.open()
    assert laptop.link.compact()
    laptop.say("c")
    vm = cast.opened(Role.WORKER)
    assert vm.listen() == ["a", "b", "c"]
