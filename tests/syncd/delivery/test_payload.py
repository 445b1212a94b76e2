"""serve/ as snapshots: the worker has the old payload or the new one, and never a mixture."""

from __future__ import annotations

import os
import stat
import threading

import pytest
from chunks import Chunks

from protocol.errors import ConfigError, RefusedError, RemoteError
from protocol.messages import FileEntry, Snapshot
from protocol.publish import temporary_beside
from protocol.snapshots import encode_snapshot
from protocol.wire import Role
from syncd.delivery import payload as payload_module
from syncd.delivery.contents import INLINE_BYTES, Contents
from syncd.delivery.payload import PayloadStore, ServedFolder, read_stages
from syncd.state import State

STAGES = b'[stages.hello]\ncommand = "true"\n'
LARGE = b"x" * (INLINE_BYTES + 1)


class Pair:
    """A controller's served folder, and a worker's payloads."""

    def __init__(self, root):
        self.here, self.there = root / "laptop", root / "vm"
        self.chunks = Chunks()
        self.chunks.role = Role.CONTROLLER
        self.states = []
        self.served = ServedFolder(*self._end(self.here))
        (self.here / "serve").mkdir()
        state, root, contents = self._end(self.there)
        self.store = PayloadStore(state, root, root / ".syncd" / "payload", contents)

    def _end(self, root):
        for name in ("payload", "content"):
            (root / ".syncd" / name).mkdir(parents=True)
        self.states.append(State(root / ".syncd" / "state.db"))
        contents = Contents(self.states[-1], root / ".syncd" / "content", lambda: self.chunks)
        return self.states[-1], root, contents

    def write(self, path, data=b"data", mode=0o644):
        target = self.here / "serve" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
        return target

    def collect(self, budget=10**9):
        with self.states[0].transaction():
            return self.served.collect(budget)

    def deliver(self, messages, wanted=()):
        with self.states[1].transaction():
            for message in messages:
                self.store.apply(message, wanted)

    def send(self):
        self.served.upload()
        messages = self.collect()
        self.deliver(messages)
        return messages

    def bring(self, wanted=()):
        order = self.served.scan()
        self.send()
        self.store.unpack(wanted)
        return order

    def files(self, folder=None):
        folder = folder or self.there / "serve"
        return {
            str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
        }


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    pair.write("stages.toml", STAGES)
    yield pair
    for state in pair.states:
        state.close()


# Arriving


def test_a_payload_arrives_whole_with_executable_bits(pair):
    pair.write("deep/run.sh", b"#!/bin/sh\n", 0o700)
    pair.write("pack.bin", LARGE)
    assert pair.bring() == 1
    assert pair.files() == {"stages.toml": STAGES, "deep/run.sh": b"#!/bin/sh\n", "pack.bin": LARGE}
    assert stat.S_IMODE((pair.there / "serve/deep/run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((pair.there / "serve/pack.bin").stat().st_mode) == 0o644
    assert not pair.served.pending()


def test_nothing_is_served_from_an_empty_folder(pair):
    (pair.here / "serve/stages.toml").unlink()
    assert pair.served.scan() == 0
    assert pair.collect() == []
    assert pair.store.newest(0) is None


def test_an_unchanged_folder_stays_one_snapshot(pair):
    assert [pair.bring() for _ in range(3)] == [1, 1, 1]
    os.utime(pair.here / "serve/stages.toml", (1, 1))
    assert pair.bring() == 1


def test_a_change_is_a_snapshot_of_its_own_and_only_what_is_new_travels(pair):
    pair.write("a", b"a")
    pair.bring()
    pair.write("b", b"b")
    pair.served.scan()
    messages = pair.send()
    assert [type(m).__name__ for m in messages] == ["Content", "Snapshot"]
    pair.store.unpack(())
    assert pair.files() == {"stages.toml": STAGES, "a": b"a", "b": b"b"}


@pytest.mark.parametrize("change", ["content", "mode", "name", "gone", "same size and time"])
def test_every_kind_of_change_is_seen(pair, change):
    path = pair.write("a", b"one")
    assert pair.bring() == 1
    before = path.stat()
    if change == "mode":
        path.chmod(0o755)
    elif change == "name":
        path.rename(path.with_name("b"))
    elif change == "gone":
        path.unlink()
    else:
        path.write_bytes(b"two")
    if change == "same size and time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pair.bring() == 2
    assert pair.files() == pair.files(pair.here / "serve")


def test_content_that_comes_back_after_it_was_dropped_is_sent_again(pair):
    for data in (b"one", b"two", b"one"):
        pair.write("a", data)
        pair.bring()
        assert pair.files()["a"] == data


def test_a_snapshot_is_sent_in_parts_when_the_budget_is_small(pair):
    for number in range(20):
        pair.write(f"f{number}", b"%d" % number * 100)
    pair.served.scan()
    pair.served.upload()
    parts = []
    while messages := pair.collect(budget=2000):
        parts.append(messages)
        pair.deliver(messages)
        pair.store.unpack(())
        assert (pair.store.newest(0) is not None) == isinstance(messages[-1], Snapshot)
    assert len(parts) > 3
    assert pair.files() == pair.files(pair.here / "serve")


def test_messages_that_come_twice_change_nothing(pair):
    pair.served.scan()
    messages = pair.send()
    pair.deliver(messages)
    pair.store.unpack(())
    pair.deliver(messages)
    pair.store.unpack(())
    assert pair.files() == {"stages.toml": STAGES}


# A snapshot is a commit


def test_an_edit_between_scan_and_upload_is_the_next_snapshots(pair):
    pair.write("a", b"one")
    pair.write("b", LARGE)
    assert pair.served.scan() == 1
    pair.write("a", b"two")
    assert [m for m in pair.send() if isinstance(m, Snapshot)] == []
    pair.store.unpack(())
    assert pair.store.newest(0) is None
    assert pair.bring() == 2
    assert pair.files()["a"] == b"two"
    assert pair.store.newest(1).order == 2  # also for the command that was appended with 1


def test_an_edit_that_is_taken_back_still_gives_the_command_a_payload(pair):
    pair.write("a", b"one")
    assert pair.bring() == 1
    pair.write("a", b"two")
    order = pair.served.scan()  # run:hello is appended here
    pair.write("a", b"one")
    pair.send()
    assert pair.bring() > order
    assert pair.store.newest(order) is not None
    assert pair.files()["a"] == b"one"


def test_a_large_file_that_changes_before_it_is_uploaded_is_the_next_snapshots(pair):
    pair.write("pack", LARGE)
    pair.served.scan()
    pair.write("pack", b"more" + LARGE)
    assert pair.send() == []
    assert not pair.served.pending()
    assert pair.bring() == 2
    assert pair.files()["pack"] == b"more" + LARGE


def test_a_file_that_is_cut_short_while_it_is_hashed_is_served_as_it_is_then(pair, monkeypatch):
    path = pair.write("a", b"x" * 1000)
    real = payload_module.file_sha256

    def cut(hashed, size):
        if path.stat().st_size == 1000:
            path.write_bytes(b"x" * 10)
        return real(hashed, size)

    monkeypatch.setattr(payload_module, "file_sha256", cut)
    pair.bring()
    assert pair.files()["a"] == b"x" * 10
    assert pair.served.problems == {}


def test_an_edit_of_two_files_during_a_scan_is_not_torn_apart(pair, monkeypatch):
    pair.write("a", b"old")
    pair.write("b", b"old")
    pair.bring()
    real, edited = payload_module.file_sha256, []

    def edit_between(path, size):
        found = real(path, size)
        if path.name == "a" and not edited:
            edited.append(path)
            pair.write("a", b"new")
            pair.write("b", b"new")
        return found

    monkeypatch.setattr(payload_module, "file_sha256", edit_between)
    pair.bring()
    assert edited
    assert {pair.files()[name] for name in ("a", "b")} == {b"new"}


def test_what_one_thread_saw_earlier_is_not_noted_after_what_another_saw(pair, monkeypatch):
    pair.write("a", b"old")
    pair.served.scan()
    pair.write("a", b"new")
    look, inside, go_on = pair.served._look, threading.Event(), threading.Event()

    def slow_look():
        found = look()
        if not inside.is_set():
            inside.set()
            go_on.wait(0.2)
        return found

    monkeypatch.setattr(pair.served, "_look", slow_look)
    thread = threading.Thread(target=pair.served.scan)
    thread.start()
    assert inside.wait(10)
    pair.write("a", b"newest")
    threading.Timer(0.05, go_on.set).start()
    order = pair.served.scan()
    thread.join()
    assert pair.served.scan() == order
    pair.send()
    pair.store.unpack(())
    assert pair.files()["a"] == b"newest"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"[stages.hello]\ncommand = ", "Invalid value"),
        (b"", r"tables \[stages"),
        (None, "there is no such file"),
    ],
)
def test_wrong_stages_are_told_and_make_no_snapshot(pair, wrong, why):
    pair.write("a", b"one")
    pair.bring()
    path = pair.here / "serve/stages.toml"
    path.unlink() if wrong is None else path.write_bytes(wrong)
    pair.write("a", b"two")
    with pytest.raises(ConfigError, match=why):
        pair.served.scan()
    assert pair.send() == []
    pair.store.unpack(())
    assert pair.files()["a"] == b"one"


def test_stages_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "stages.toml").mkdir()
    with pytest.raises(ConfigError, match=r"stages\.toml: Is a directory"):
        read_stages(tmp_path)


def test_what_cannot_be_served_is_named_and_the_rest_goes_on(pair, caplog):
    pair.write("good")
    pair.write("a:b")
    (pair.here / "serve/link").symlink_to("/etc/passwd")
    os.mkfifo(pair.here / "serve/fifo")
    pair.write("half.tmp")
    pair.bring()
    assert sorted(pair.files()) == ["good", "stages.toml"]
    assert sorted(pair.served.problems) == ["serve/a:b", "serve/fifo", "serve/link"]
    assert "serve/link: left out" in caplog.text


# At the worker


def test_the_link_always_leads_to_a_whole_payload(pair):
    pair.write("version", b"0")
    pair.write("again", b"0")
    pair.bring()
    stop, seen, torn = threading.Event(), set(), []

    def look():
        while not stop.is_set():
            folder = (pair.there / "serve").resolve()
            found = {(folder / name).read_bytes() for name in ("version", "again")}
            seen.update(found)
            torn.extend(found if len(found) > 1 else ())

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 8):
        for name in ("version", "again"):
            pair.write(name, b"%d" % number)
        pair.bring()
    stop.set()
    thread.join()
    assert torn == []
    assert len(seen) > 1


def test_a_folder_of_the_users_own_is_not_replaced_by_the_link(pair):
    (pair.there / "serve").mkdir()
    (pair.there / "serve/mine").write_bytes(b"mine")
    pair.bring()
    assert pair.files() == {"mine": b"mine"}
    assert pair.store.newest(0) is not None


def test_payloads_that_runs_use_are_kept_and_others_are_removed(pair):
    for number in range(1, 5):
        pair.write("a", b"%d" % number)
        pair.bring(wanted=(2,))
    pair.store.prune((2,))
    kept = sorted(p.name[:6] for p in (pair.there / ".syncd/payload").iterdir())
    assert kept == ["000002", "000004"]
    assert pair.files(pair.store.exactly(2).folder)["a"] == b"2"
    assert pair.store.exactly(3) is None
    assert pair.store.newest(5) is None


def test_contents_of_a_snapshot_that_a_run_needs_outlive_the_next(pair):
    pair.write("a", b"one")
    pair.served.scan()
    pair.send()
    pair.write("a", b"two")
    pair.served.scan()
    pair.served.upload()
    pair.deliver(pair.collect(), wanted=(1,))
    pair.store.unpack((1,))
    assert pair.files(pair.store.exactly(1).folder)["a"] == b"one"
    assert pair.files()["a"] == b"two"


def test_what_a_killed_worker_had_begun_to_unpack_is_removed(pair):
    folder = pair.there / ".syncd" / "payload"
    (temporary_beside(folder / "000001-aa") / "scripts").mkdir(parents=True)
    temporary_beside(pair.there / "serve").symlink_to(folder / "000001-aa")
    PayloadStore(pair.states[1], pair.there, folder, pair.store._contents)
    assert list(folder.iterdir()) == []
    assert not list(pair.there.glob(".serve.*"))


def test_a_damaged_content_keeps_the_payload_out_until_it_is_mended(pair):
    pair.write("pack", LARGE)
    pair.served.scan()
    pair.send()
    (name, good) = next(iter(pair.chunks.kept.items()))
    pair.chunks.kept[name] = b"y" * len(good)
    pair.store.unpack(())
    assert pair.store.newest(0) is None
    assert "payload 1 is not unpacked" in pair.store.problem
    assert list((pair.there / ".syncd/payload").iterdir()) == []
    pair.chunks.kept[name] = good
    pair.store.unpack(())
    assert pair.store.problem == ""
    assert pair.files()["pack"] == LARGE


def test_an_unreachable_remote_is_the_callers_to_handle(pair, monkeypatch):
    pair.write("pack", LARGE)
    pair.served.scan()
    pair.send()

    def fail(pieces, *, trusting):
        raise RemoteError("read a chunk", why="no route")

    monkeypatch.setattr(pair.chunks, "read_pieces", fail)
    with pytest.raises(RemoteError):
        pair.store.unpack(())


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "nul"])
def test_a_snapshot_with_an_unsafe_path_is_refused(pair, path):
    entry = FileEntry(path=path, size=1, mode=0o644, sha256="0" * 64)
    with pytest.raises(RefusedError):
        pair.deliver([encode_snapshot(1, [entry])])


def test_five_thousand_small_files_cost_no_sync_each_and_are_hashed_once(pair, monkeypatch):
    for number in range(50):
        (pair.here / f"serve/d{number}").mkdir()
    for number in range(5000):
        (pair.here / f"serve/d{number % 50}/{number}").write_bytes(b"%d" % number)
    monkeypatch.setattr(payload_module, "TICK_SECONDS", 0.0)
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    pair.bring()
    assert len(pair.files()) == 5001
    assert len(synced) < 50
    monkeypatch.setattr(payload_module, "file_sha256", None)
    pair.served.scan()


def test_a_folder_that_did_not_change_is_walked_once_and_no_more(pair, monkeypatch):
    monkeypatch.setattr(payload_module, "TICK_SECONDS", 0.0)
    pair.write("a", b"old")
    order = pair.bring()
    walks = []
    walk = payload_module.walk
    monkeypatch.setattr(payload_module, "walk", lambda *how: walks.append(how) or walk(*how))
    known = ServedFolder._known_hash
    monkeypatch.setattr(ServedFolder, "_known_hash", None)
    assert pair.served.scan() == order
    assert len(walks) == 1
    monkeypatch.setattr(ServedFolder, "_known_hash", known)
    pair.write("a", b"new")
    assert pair.served.scan() > order


def test_a_file_that_changed_just_now_is_looked_into_again(pair):
    """It could change once more within the tick of the file system's clock."""
    pair.write("a", b"old")
    order = pair.bring()
    found = (pair.here / "serve/a").stat()
    pair.write("a", b"new")
    os.utime(pair.here / "serve/a", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert pair.served.scan() > order


def test_a_snapshot_that_was_given_up_is_made_anew_though_nothing_changed(pair, monkeypatch):
    monkeypatch.setattr(payload_module, "TICK_SECONDS", 0.0)
    pair.write("a", LARGE)
    order = pair.served.scan()
    assert pair.served.scan() == order
    with pair.states[0].transaction():
        pair.served._mark(order, payload_module.Ready.GIVEN_UP)
    assert pair.served.scan() > order
