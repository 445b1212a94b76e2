"""Contents that are fetched while the other end is still sending them."""

from __future__ import annotations

import hashlib

import pytest
from chunks import Chunks

from protocol.errors import DataError
from protocol.messages import Content, Piece
from syncd.delivery.contents import Contents
from syncd.rclone.remote import Transient
from syncd.state import State

PARTS = [b"one" * 100, b"two" * 100, b"three" * 100]
WHOLE = b"".join(PARTS)
SHA256 = hashlib.sha256(WHOLE).hexdigest()


class End:
    """A reader, and what a sender says to it."""

    def __init__(self, folder):
        self.chunks = Chunks()
        self.folder = folder
        (folder / "files").mkdir()
        self.state = State(folder / "state.db")
        self.pieces = tuple(
            Piece(object=self.chunks.put_chunk(part), offset=0, length=len(part)) for part in PARTS
        )
        self.read = []
        self.start()

    def start(self):
        self.contents = Contents(self.state, self.folder / "files", lambda: self)

    def read_pieces(self, pieces, *, trusting=False):
        for piece in pieces:
            self.read.append(self.pieces.index(piece))
            yield from self.chunks.read_pieces([piece], trusting=trusting)

    def say(self, count, sha256=SHA256):
        self.contents.receive(Content(sha256=sha256, size=len(WHOLE), pieces=self.pieces[:count]))

    def place(self):
        target = self.folder / "target"
        self.contents.place(SHA256, target, mode=0o640, size=len(WHOLE))
        return target

    def leftovers(self):
        return list((self.folder / "files").iterdir())


@pytest.fixture
def end(tmp_path):
    end = End(tmp_path)
    yield end
    end.state.close()


def test_what_was_fetched_early_is_not_fetched_again(end):
    end.say(1)
    end.contents.fetch_early()
    end.say(2)
    end.contents.fetch_early()
    assert end.read == [0, 1]
    end.say(3)
    target = end.place()
    assert end.read == [0, 1, 2]
    assert target.read_bytes() == WHOLE
    assert target.stat().st_mode & 0o777 == 0o640
    assert end.leftovers() == []


def test_nothing_is_placed_of_a_content_that_is_not_whole(end):
    end.say(2)
    end.contents.fetch_early()
    with pytest.raises(DataError, match="do not add up"):
        end.place()
    assert not (end.folder / "target").exists()


def test_bytes_that_are_others_are_never_placed(end):
    end.chunks.kept[end.pieces[1].object] = b"TWO" * 100
    end.say(2)
    end.contents.fetch_early()
    end.say(3)
    with pytest.raises(DataError, match="not those announced"):
        end.place()
    assert not (end.folder / "target").exists()
    end.chunks.kept[end.pieces[1].object] = PARTS[1]
    assert end.place().read_bytes() == WHOLE
    assert end.leftovers() == []


def test_a_content_that_lies_elsewhere_in_the_end_is_fetched_from_there(end):
    end.say(2)
    end.contents.fetch_early()
    moved = Piece(object=end.chunks.put_chunk(WHOLE), offset=0, length=len(WHOLE))
    end.pieces = (moved, *end.pieces)
    end.contents.receive(Content(sha256=SHA256, size=len(WHOLE), pieces=(moved,)))
    assert end.place().read_bytes() == WHOLE
    assert end.leftovers() == []


def test_what_is_said_again_of_the_beginning_does_not_undo_the_whole(end):
    end.say(3)
    end.say(1)
    end.contents.fetch_early()
    assert end.place().read_bytes() == WHOLE


def test_a_link_that_breaks_costs_what_has_not_come(end, monkeypatch):
    end.say(2)

    def broken(pieces, *, trusting=False):
        yield from End.read_pieces(end, pieces[:1])
        raise Transient("download", why="the link is down")

    monkeypatch.setattr(end, "read_pieces", broken)
    with pytest.raises(Transient):
        end.contents.fetch_early()
    monkeypatch.undo()
    end.say(3)
    assert end.place().read_bytes() == WHOLE
    assert end.read == [0, 1, 2]


def test_what_an_earlier_daemon_had_fetched_early_is_removed(end):
    end.say(2)
    end.contents.fetch_early()
    assert end.leftovers()
    end.start()
    assert end.leftovers() == []
    end.say(3)
    assert end.place().read_bytes() == WHOLE


def test_a_content_that_was_given_up_for_another_is_forgotten(end):
    end.say(1)
    end.contents.fetch_early()
    end.say(1, sha256="0" * 64)
    assert end.leftovers() == []
    end.contents.keep_only(set())
    end.contents.fetch_early()
    assert end.leftovers() == []


def test_a_chunk_that_is_gone_keeps_nothing_else_away(end):
    end.say(2)
    kept = end.chunks.kept.pop(end.pieces[0].object)
    end.contents.fetch_early()
    assert end.leftovers() == []
    end.chunks.kept[end.pieces[0].object] = kept
    end.say(3)
    assert end.place().read_bytes() == WHOLE
