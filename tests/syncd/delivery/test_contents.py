"""Contents: brought over by their hash, and never taken for another's."""

from __future__ import annotations

import hashlib
import stat

import pytest
from chunks import Chunks
from crashing import taken_back

from protocol.errors import DataError, RefusedError
from protocol.messages import Content, Piece
from syncd.delivery.contents import INLINE_BYTES, Contents
from syncd.delivery.uploads import Source
from syncd.rclone.remote import NotFound
from syncd.state import State

SMALL, LARGE = b"small", b"large" * INLINE_BYTES


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def source(path, data):
    return Source(path=path, sha256=sha256(data), size=len(data))


@pytest.fixture
def chunks():
    return Chunks()


@pytest.fixture
def make(tmp_path, chunks):
    """Return a function that makes an end's contents."""
    states = []

    def make(name):
        folder = tmp_path / name / "files"
        folder.mkdir(parents=True)
        states.append(State(tmp_path / name / "state.db"))
        return Contents(states[-1], folder, lambda: chunks)

    yield make
    for state in states:
        state.close()


def send(sender, receiver, path):
    data = path.read_bytes()
    if len(data) > INLINE_BYTES:
        assert not sender.upload([source(path, data)])
    message = sender.message(path, sha256(data), len(data))
    receiver.receive(message)
    return message


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_a_content_arrives_as_it_was(make, tmp_path, data):
    here, there = make("here"), make("there")
    (tmp_path / "source").write_bytes(data)
    message = send(here, there, tmp_path / "source")
    assert bool(message.pieces) == (len(data) > INLINE_BYTES)
    there.place(sha256(data), tmp_path / "target", mode=0o755, size=len(data))
    assert (tmp_path / "target").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o755


def test_a_file_is_never_placed_without_its_owner_being_able_to_write_it(make, tmp_path):
    here, there = make("here"), make("there")
    (tmp_path / "source").write_bytes(SMALL)
    send(here, there, tmp_path / "source")
    there.place(sha256(SMALL), tmp_path / "target", mode=0o4044, size=len(SMALL))
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o644


def test_a_content_is_uploaded_once(make, tmp_path, chunks, monkeypatch):
    here = make("here")
    (tmp_path / "source").write_bytes(LARGE)
    here.upload([source(tmp_path / "source", LARGE)])
    monkeypatch.setattr(chunks, "put_chunk", lambda payload: pytest.fail("again"))
    assert not here.upload([source(tmp_path / "source", LARGE)] * 2)


def test_a_file_that_changed_is_not_sent_as_what_it_was(make, tmp_path):
    here = make("here")
    (tmp_path / "source").write_bytes(LARGE[:-1] + b"x")
    failed = here.upload([source(tmp_path / "source", LARGE)])
    assert "it changed meanwhile" in str(failed[tmp_path / "source"])
    assert here.message(tmp_path / "source", sha256(LARGE), len(LARGE)) is None
    assert here.message(tmp_path / "gone", sha256(SMALL), len(SMALL)) is None
    assert here.message(tmp_path, sha256(SMALL), len(SMALL)) is None  # a folder


def test_bytes_that_are_not_those_of_the_hash_are_refused(make):
    with pytest.raises(RefusedError, match="its bytes are others"):
        make("there").receive(Content(sha256=sha256(SMALL), size=5, blob=b"smalL"))


def test_a_damaged_chunk_is_refused_and_leaves_nothing_behind(make, tmp_path, chunks):
    here, there = make("here"), make("there")
    (tmp_path / "source").write_bytes(LARGE)
    send(here, there, tmp_path / "source")
    for name in chunks.kept:
        chunks.kept[name] = chunks.kept[name][:-1] + b"x"
    folder = tmp_path / "target"
    folder.mkdir()
    with pytest.raises(DataError, match="not those announced"):
        there.place(sha256(LARGE), folder / "file", mode=0o644, size=len(LARGE))
    assert list(folder.iterdir()) == []


def test_a_content_that_nobody_announced_or_that_does_not_add_up_is_named(make, tmp_path, chunks):
    there = make("there")
    with pytest.raises(DataError, match="it was never announced"):
        there.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))
    piece = Piece(object="w-000001-00000000/x", offset=0, length=4)
    there.receive(Content(sha256=sha256(SMALL), size=5, pieces=(piece,)))
    with pytest.raises(DataError, match="do not add up"):
        there.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))
    piece = Piece(object="w-000001-00000000/x", offset=0, length=5)
    there.receive(Content(sha256=sha256(SMALL), size=5, pieces=(piece,)))
    with pytest.raises(NotFound):
        there.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))
    assert not (tmp_path / "target").exists()


def test_what_is_kept_is_told_apart_by_who_keeps_it(tmp_path, chunks):
    state = State(tmp_path / "state.db")
    payload, files = [Contents(state, tmp_path / n, lambda: chunks) for n in ("payload", "files")]
    message = Content(sha256=sha256(SMALL), size=5, blob=SMALL)
    for contents in (payload, files):
        contents.receive(message)
    files.forget(sha256(SMALL))
    payload.keep_only({sha256(SMALL)})
    payload.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))
    payload.keep_only(set())
    with pytest.raises(DataError):
        payload.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))
    state.close()


def test_what_was_dropped_in_a_transaction_that_was_taken_back_is_still_there(make, tmp_path):
    there = make("there")
    there.receive(Content(sha256=sha256(SMALL), size=5, blob=SMALL))
    with taken_back(there._state):
        there.keep_only(set())
    there.place(sha256(SMALL), tmp_path / "target", mode=0o644, size=len(SMALL))


def test_room_is_a_little_more_than_the_size(make, monkeypatch):
    there = make("there")
    usage = type("Usage", (), {"free": 100 * 2**20})
    monkeypatch.setattr("syncd.delivery.contents.shutil.disk_usage", lambda path: usage)
    assert there.room_for("", 30 * 2**20)
    assert not there.room_for("", 40 * 2**20)
