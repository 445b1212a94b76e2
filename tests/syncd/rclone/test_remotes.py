"""Several remotes as one, each of them one that fails when the test says so."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from fake_remote import FakeRemote, Faults, Store, Unreliable

from protocol.errors import DataError, RemoteError
from protocol.wire import Kind, ObjectName
from syncd.rclone import remotes as module
from syncd.rclone.profiles import DRIVE, LOCAL, Profile
from syncd.rclone.remote import NotFound, Transient
from syncd.rclone.remotes import RETRY_SECONDS, Lane, Remotes

FOLDER = "w-000001-00000000"
PATH = f"{FOLDER}/one"


class Switched(Unreliable):
    """A remote with a switch, and counted listings."""

    def __init__(self, profile: Profile = LOCAL) -> None:
        self.store, self.faults = Store(), Faults(random.Random(0))
        super().__init__(FakeRemote(self.store, Faults(random.Random(0)), "me"), self.faults, "me")
        self._profile, self.listings = profile, 0

    def profile(self) -> Profile:
        return self._profile

    def list(self, folder):
        self.listings += 1
        return super().list(folder)

    def hash_kind(self) -> str:
        return self._call("hash kind", "", lambda: "sha1" if self._profile is DRIVE else "md5")

    def hash_of(self, path: str, kind: str) -> str:
        digest = hashlib.new(kind, self.read(path, limit=100), usedforsecurity=False)
        return digest.hexdigest()

    def switch(self, on: bool) -> None:
        self.faults.error = 0.0 if on else 1.0

    def put(self, path: str, body: bytes) -> None:
        source = Path(path.replace("/", "-"))
        source.write_bytes(body)
        self.remote.upload(source, path)

    def names(self, folder: str) -> set[str]:
        return {entry.name for entry in self.remote.list(folder)}


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def trio(clock, tmp_path, monkeypatch):
    """A fast remote, a slow one, and both as one."""
    monkeypatch.chdir(tmp_path)
    fast, slow = Switched(), Switched(DRIVE)
    return fast, slow, Remotes([Lane(fast), Lane(slow)])


def names(remotes, folder="w-000001-00000000"):
    return sorted(entry.name for entry in remotes.list(folder))


def upload(remotes, path=PATH, body=b"body"):
    Path("source").write_bytes(body)
    remotes.upload(Path("source"), path)


def test_what_is_sent_goes_to_the_first(trio):
    fast, slow, remotes = trio
    upload(remotes)
    assert fast.store.files
    assert not slow.store.files


def test_it_goes_to_the_next_while_the_first_fails_and_to_the_first_once_it_is_back(trio, clock):
    fast, slow, remotes = trio
    fast.switch(False)
    upload(remotes)
    assert list(slow.store.files) == [PATH]
    assert remotes.profile() == DRIVE
    fast.switch(True)
    remotes.probe()
    upload(remotes, f"{PATH}2")
    assert not fast.store.files  # it is not due yet
    clock.now += 60
    remotes.probe()
    upload(remotes, f"{PATH}3")
    assert list(fast.store.files) == [f"{PATH}3"]
    assert remotes.profile() == LOCAL


def test_hashes_are_those_of_the_last_and_while_it_fails_nobody_waits_for_them(trio):
    fast, slow, remotes = trio
    slow.put(PATH, b"body")
    assert remotes.hash_kind() == "sha1"
    assert remotes.hash_of(PATH, "sha1") == hashlib.sha1(b"body").hexdigest()
    fast.put(f"{PATH}2", b"body")
    with pytest.raises(NotFound):
        remotes.hash_of(f"{PATH}2", "sha1")
    slow.switch(False)
    assert remotes.hash_kind() == ""
    upload(remotes, f"{PATH}3")


def test_one_that_goes_on_failing_is_tried_ever_more_rarely(trio, clock):
    fast, _, remotes = trio
    fast.switch(False)
    for _ in range(600):
        remotes.list("")
        remotes.probe()
        clock.now += 1.0
    assert fast.listings < 40


def test_an_object_that_is_on_both_is_listed_once_and_what_is_on_one_is_listed(trio):
    fast, slow, remotes = trio
    fast.put(PATH, b"body")
    slow.put(PATH, b"body")
    slow.put(f"{PATH}2", b"body")
    assert names(remotes) == ["one", "one2"]


def test_a_torn_object_is_read_from_where_it_is_whole(trio):
    fast, slow, remotes = trio
    fast.put(PATH, b"bo")
    slow.put(PATH, b"body")
    assert {entry.size for entry in remotes.list("w-000001-00000000")} == {2, 4}
    assert remotes.read(PATH, limit=4) == b"body"


def test_what_one_of_them_may_have_is_not_known_to_be_gone(trio):
    fast, slow, remotes = trio
    with pytest.raises(NotFound):
        remotes.read(PATH, limit=4)
    slow.switch(False)
    with pytest.raises(Transient):
        remotes.read(PATH, limit=4)
    fast.put(PATH, b"body")
    assert remotes.read(PATH, limit=4) == b"body"


def test_a_slow_one_is_listed_now_and_then_while_a_fast_one_answers(trio, clock):
    fast, slow, remotes = trio
    for _ in range(int(10 * DRIVE.idle_poll_seconds)):
        remotes.list("")
        clock.now += 1.0
    assert fast.listings == int(10 * DRIVE.idle_poll_seconds)
    assert slow.listings == 10


def test_and_more_often_once_it_has_shown_what_the_fast_one_has_not(trio, clock):
    fast, slow, remotes = trio
    fast.put(PATH, b"body")
    slow.put(f"{PATH}2", b"body")
    for _ in range(20):
        remotes.list("w-000001-00000000")
        clock.now += DRIVE.poll_seconds + 0.1
    assert slow.listings == 20


def test_a_slow_one_alone_is_listed_each_time(trio, clock):
    fast, slow, remotes = trio
    fast.switch(False)
    for _ in range(5):
        remotes.list("")
    assert slow.listings == 5


def test_what_is_deleted_is_deleted_on_both_and_one_that_fails_keeps_it_from_nothing(trio):
    fast, slow, remotes = trio
    for remote in (fast, slow):
        remote.put(PATH, b"body")
    remotes.delete(FOLDER, ["one"])
    assert not fast.store.files
    assert not slow.store.files
    for remote in (fast, slow):
        remote.put(PATH, b"body")
    fast.switch(False)
    remotes.delete(FOLDER, ["one"])
    assert fast.store.files
    assert not slow.store.files


def test_an_error_is_told_when_all_of_them_fail(trio):
    fast, slow, remotes = trio
    for remote in (fast, slow):
        remote.switch(False)
    for call in (
        lambda: remotes.list(""),
        lambda: remotes.read(PATH, limit=1),
        lambda: upload(remotes),
        lambda: remotes.delete(FOLDER, ["one"]),
        remotes.make_root,
        remotes.check,
    ):
        with pytest.raises(RemoteError):
            call()


def test_with_all_of_them_down_the_one_that_comes_back_is_found(trio, clock):
    fast, slow, remotes = trio
    for remote in (fast, slow):
        remote.switch(False)
    with pytest.raises(Transient):
        remotes.list("")
    slow.switch(True)
    for _ in range(100):
        clock.now += 1.0
        remotes.probe()
    assert remotes.first == 1
    upload(remotes)
    assert list(slow.store.files) == [PATH]


def test_another_way_to_the_first_is_tried_when_it_does_not_answer(trio, clock):
    fast, _, remotes = trio
    moved = Switched()
    fast.switch(False)
    remotes.lanes[0].add_way(moved)
    remotes.list("")
    clock.now += 5.0
    remotes.probe()
    upload(remotes)
    assert list(moved.store.files) == [PATH]
    moved.switch(False)
    fast.switch(True)
    remotes.list("")
    clock.now += 60.0
    remotes.probe()
    upload(remotes, f"{PATH}2")
    assert list(fast.store.files) == [f"{PATH}2"]


def test_the_newest_way_and_the_one_given_are_tried_each_time_and_none_between(trio, clock):
    fast, _, remotes = trio
    lane, ways = remotes.lanes[0], [Switched() for _ in range(20)]
    for way in ways:
        for other in (fast, *ways):
            other.switch(False)
        remotes.list("")
        way.switch(True)
        lane.add_way(way)
        remotes.probe()
        assert lane.remote is way
    assert lane.ways == 2
    ways[-1].switch(False)
    for _ in range(20):
        remotes.list("")
        clock.now += 100.0
        remotes.probe()
    ways[-1].switch(True)
    clock.now += RETRY_SECONDS[1]
    remotes.probe()
    assert lane.up
    upload(remotes)
    assert list(ways[-1].store.files) == [PATH]


def test_two_calls_that_fail_at_once_do_not_skip_a_way(trio):
    fast, _, remotes = trio
    lane, moved = remotes.lanes[0], Switched()
    lane.add_way(moved)
    for _ in range(2):
        lane.note_failure(fast, 0.0)
    assert lane.remote is moved


def test_an_object_that_is_damaged_on_one_is_read_from_another(trio, tmp_path):
    fast, slow, remotes = trio
    body = b"what it should be"
    name = ObjectName(1, Kind.CHUNK, len(body), hashlib.sha256(body).hexdigest())
    path = f"{FOLDER}/{name}"
    fast.put(path, bytes(len(body)))  # of the right length, as a power cut may leave it
    slow.put(path, body)
    assert remotes.read(path, limit=len(body)) == body
    remotes.download(path, tmp_path / "target", length=len(body))
    assert (tmp_path / "target").read_bytes() == body
    slow.switch(False)
    with pytest.raises(DataError, match="not what its name says"):
        remotes.download(path, tmp_path / "other", length=len(body))
    assert not (tmp_path / "other").exists()


def test_an_object_that_is_too_long_on_one_is_read_from_another(trio):
    fast, slow, remotes = trio
    fast.put(PATH, b"body and more")
    slow.put(PATH, b"body")
    assert remotes.read(PATH, limit=4) == b"body"


def test_the_last_is_where_workers_meet(trio):
    _, slow, remotes = trio
    assert remotes.anchor() is slow
