"""Whole files from the other end: what is put in place, what is refused."""

from __future__ import annotations

import pytest
from file_pair import LARGE, RUN

from protocol.errors import RefusedError
from protocol.messages import DropFile, PutFile
from protocol.publish import temporary_beside
from syncd.delivery.files import checked_path


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "in/artifacts/../../outside", "/etc/passwd", "in/artifacts//x", "serve/x",
        "queue.txt", ".syncd/key", "in/results.json", "in/artifactsx/y", "store", "in/artifacts",
        "in/artifacts/con", "in/artifacts/a\0b", "in/artifacts/" + "x" * 300, "",
    ],
)  # fmt: skip
def test_a_path_that_no_worker_may_name_is_refused(pair, path):
    for message in (PutFile(path=path, size=1, mode=0o644, sha256="0" * 64), DropFile(path=path)):
        with pytest.raises(RefusedError):
            pair.deliver([message])
    with pytest.raises(RefusedError):
        checked_path(path)
    assert pair.remote.missing() == []


def test_a_folder_that_is_a_link_is_not_followed(pair):
    outside = pair.there / "outside"
    outside.mkdir(parents=True)
    (pair.there / "in/artifacts").mkdir(parents=True)
    (pair.there / RUN).symlink_to(outside)
    pair.write(f"{RUN}/a")
    pair.write(f"{RUN}/deep/b")
    pair.write("in/artifacts/other/c")
    assert not pair.bring()
    assert list(outside.iterdir()) == []
    assert sorted(pair.remote.problems) == [f"{RUN}/a", f"{RUN}/deep/b"]
    assert "a folder of it is a link" in pair.remote.problems[f"{RUN}/a"]
    assert (pair.there / "in/artifacts/other/c").exists()


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_written_through(pair):
    outside = pair.there / "outside"
    outside.write_bytes(b"mine")
    (pair.there / RUN).mkdir(parents=True)
    (pair.there / RUN / "a").symlink_to(outside)
    pair.write(f"{RUN}/a", b"theirs")
    assert pair.bring()
    assert outside.read_bytes() == b"mine"
    assert (pair.there / RUN / "a").read_bytes() == b"theirs"


def test_a_folder_in_the_place_of_a_file_is_named_and_others_go_on(pair):
    (pair.there / RUN / "a" / "mine").mkdir(parents=True)
    pair.write(f"{RUN}/a")
    pair.write(f"{RUN}/b")
    assert not pair.bring()
    assert list(pair.remote.problems) == [f"{RUN}/a"]
    assert (pair.there / RUN / "b").exists()


def test_a_full_disk_is_named_and_what_fits_goes_on(pair, monkeypatch):
    pair.write(f"{RUN}/large", LARGE)
    pair.write(f"{RUN}/small", b"x")
    room = pair.remote._contents.room_for
    monkeypatch.setattr(pair.remote._contents, "room_for", lambda sha256, size: size < 100)
    assert not pair.bring()
    assert "the disk is full" in pair.remote.problems[f"{RUN}/large"]
    assert (pair.there / RUN / "small").exists()
    monkeypatch.setattr(pair.remote._contents, "room_for", room)
    assert pair.remote.fetch()
    assert pair.remote.problems == {}


def test_a_chunk_that_is_gone_is_named_and_others_go_on(pair):
    pair.write(f"{RUN}/large", LARGE)
    pair.write(f"{RUN}/small", b"x")
    pair.local.scan(lambda p: True)
    pair.deliver(pair.collect())
    pair.chunks.kept.clear()
    assert not pair.remote.fetch()
    assert list(pair.remote.problems) == [f"{RUN}/large"]
    assert (pair.there / RUN / "small").exists()


def test_a_file_replaced_before_it_was_fetched_arrives_as_the_newer_one(pair):
    for data in (b"one", b"two"):
        pair.write(f"{RUN}/a", data)
        pair.local.scan(lambda p: True)
        pair.deliver(pair.collect())
    assert pair.remote.fetch()
    assert (pair.there / RUN / "a").read_bytes() == b"two"
    assert pair.blobs() == []


def test_messages_that_come_twice_change_nothing(pair):
    pair.write(f"{RUN}/a")
    pair.local.scan(lambda p: True)
    messages = pair.collect()
    for _ in range(2):
        pair.deliver(messages)
        assert pair.remote.fetch()
    assert pair.blobs() == []


def test_what_has_arrived_stays_when_the_worker_drops_it(pair):
    path = pair.write(f"{RUN}/a")
    pair.bring()
    path.unlink()
    pair.bring()
    assert (pair.there / RUN / "a").exists()


def test_what_a_fetch_that_was_killed_had_fetched_is_removed_by_the_next(pair):
    pair.write(f"{RUN}/a")
    (pair.there / RUN).mkdir(parents=True)
    temporary_beside(pair.there / RUN / "a").write_bytes(b"da")
    assert pair.bring()
    assert [p.name for p in (pair.there / RUN).iterdir()] == ["a"]


def test_what_comes_late_takes_the_place_of_nothing_that_was_made_here_meanwhile(pair):
    for name in ("a", "b"):
        pair.write(f"{RUN}/{name}", name.encode() + LARGE)
    pair.local.scan(lambda p: True)
    chunks, pair.chunks.kept = dict(pair.chunks.kept), {}
    pair.deliver(pair.collect())
    assert not pair.remote.fetch()
    assert len(pair.remote.problems) == 2
    (pair.there / RUN).mkdir(parents=True, exist_ok=True)
    (pair.there / RUN / "a").write_bytes(b"made here")
    pair.chunks.kept = chunks
    assert pair.remote.fetch(sparing=True)
    assert (pair.there / RUN / "a").read_bytes() == b"made here"
    assert (pair.there / RUN / "b").read_bytes() == b"b" + LARGE
    assert pair.remote.problems == {}


def test_files_that_this_end_does_not_want_leave_nothing_here(pair):
    pair.write("store/champion/model.onnx", b"model")
    assert pair.bring()
    assert not (pair.there / "store").exists()
    assert pair.blobs() == []
