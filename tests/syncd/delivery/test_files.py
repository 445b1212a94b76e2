"""Whole files from the worker to the other end: what is sent, and what is left out."""

from __future__ import annotations

import os
import socket
import stat

import pytest
from file_pair import LARGE, RUN

from protocol.messages import DropFile, PutFile
from syncd.delivery import files as files_module
from syncd.delivery.files import is_growing


def puts(messages):
    return sorted(m.path for m in messages if isinstance(m, PutFile))


def test_files_arrive_with_content_and_mode(pair):
    pair.write(f"{RUN}/encoder.pt", LARGE)
    pair.write(f"{RUN}/deep/run.sh", b"#!/bin/sh\n", 0o755)
    pair.write("in/checkpoints.json", b"{}")
    assert pair.bring()
    assert (pair.there / RUN / "encoder.pt").read_bytes() == LARGE
    assert (pair.there / "in/checkpoints.json").read_bytes() == b"{}"
    assert stat.S_IMODE((pair.there / RUN / "deep/run.sh").stat().st_mode) == 0o755
    assert not pair.local.scan(lambda path: True)
    assert pair.collect() == []


def test_equal_files_all_arrive(pair):
    for name in ("a", "b", "c"):
        pair.write(f"{RUN}/{name}", b"")
    assert pair.bring()
    assert [p.name for p in sorted((pair.there / RUN).iterdir())] == ["a", "b", "c"]
    assert pair.blobs() == []


def test_a_file_that_has_just_changed_waits(pair):
    path = pair.write(f"{RUN}/a")
    assert not pair.local.scan()
    assert pair.collect() == []
    assert pair.local.scan(lambda p: p == f"{RUN}/a")  # its run is over
    assert puts(pair.collect()) == [f"{RUN}/a"]
    assert path.exists()


def test_a_file_of_which_the_time_is_set_to_the_future_does_not_wait_for_it(pair, monkeypatch):
    path = pair.write(f"{RUN}/a")
    os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(files_module, "SETTLE_SECONDS", 0.0)
    assert pair.local.scan()


def test_a_change_that_keeps_size_and_modification_time_is_seen(pair):
    path = pair.write(f"{RUN}/a", b"one")
    pair.bring()
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    pair.bring()
    assert (pair.there / RUN / "a").read_bytes() == b"two"


def test_a_file_that_changed_after_it_was_hashed_is_sent_as_it_is_later(pair):
    path = pair.write(f"{RUN}/a", b"one")
    pair.local.scan(lambda p: True)
    path.write_bytes(b"another")
    assert pair.collect() == []
    pair.bring()
    assert (pair.there / RUN / "a").read_bytes() == b"another"


def test_an_end_is_behind_until_every_file_was_said(pair):
    pair.write(f"{RUN}/a", LARGE)
    (pair.here / RUN / "link").symlink_to("a")
    assert not pair.local.scan()
    assert pair.local.is_behind(), "it may change yet"
    pair.local.scan(lambda p: True)
    assert pair.local.is_behind(), "it was not said"
    pair.collect()
    assert not pair.local.is_behind(), "what is never sent is nothing to wait for"


def test_a_large_file_that_changes_while_it_is_sent_is_named_and_others_go_on(pair, monkeypatch):
    path = pair.write(f"{RUN}/a", LARGE)
    pair.write(f"{RUN}/b", LARGE)
    real = files_module.file_sha256

    def hash_and_change(hashed, size=None):
        found = real(hashed, size)
        if hashed == path and path.stat().st_size == len(LARGE):
            path.write_bytes(b"more" + LARGE)
        return found

    monkeypatch.setattr(files_module, "file_sha256", hash_and_change)
    pair.local.scan(lambda p: True)
    assert list(pair.local.problems) == [f"{RUN}/a"]
    assert "it changed meanwhile" in pair.local.problems[f"{RUN}/a"]
    assert puts(pair.collect()) == [f"{RUN}/b"]
    assert pair.local.is_behind()
    pair.local.scan(lambda p: True)
    assert pair.local.problems == {}
    assert puts(pair.collect()) == [f"{RUN}/a"]


def test_a_file_that_was_cut_short_since_it_was_found_is_named_and_not_sent(pair, monkeypatch):
    path = pair.write(f"{RUN}/a", LARGE)
    real = files_module.file_sha256

    def cut(hashed, size):
        path.write_bytes(LARGE[:10])
        return real(hashed, size)

    monkeypatch.setattr(files_module, "file_sha256", cut)
    pair.local.scan(lambda p: True)
    assert "it changed meanwhile" in pair.local.problems[f"{RUN}/a"]
    assert pair.collect() == []
    monkeypatch.setattr(files_module, "file_sha256", real)
    assert pair.bring()
    assert (pair.there / RUN / "a").read_bytes() == LARGE[:10]


def test_a_file_that_is_gone_before_it_was_sent_is_not_said(pair):
    path = pair.write(f"{RUN}/a")
    pair.local.scan(lambda p: True)
    path.unlink()
    assert pair.collect() == []


def test_a_file_that_is_gone_is_said_once_and_comes_again(pair):
    path = pair.write(f"{RUN}/a")
    pair.bring()
    path.unlink()
    assert pair.local.scan()
    assert pair.collect() == [DropFile(path=f"{RUN}/a")]
    assert not pair.local.scan()
    pair.write(f"{RUN}/a", b"again")
    pair.local.scan(lambda p: True)
    assert puts(pair.collect()) == [f"{RUN}/a"]


def test_the_budget_bounds_a_collect_and_the_rest_follows(pair):
    for number in range(5):
        pair.write(f"{RUN}/{number}", b"%d" % number * 1000)
    pair.local.scan(lambda p: True)
    first = pair.collect(budget=2000)
    assert len(puts(first)) == 2
    assert len(puts(pair.collect())) == 3


def test_growing_files_are_named_and_sent_whole_when_they_have_grown_by_half(pair):
    for name in ("metrics.jsonl", "x.log", "events.out.tfevents.1.host"):
        assert is_growing(f"{RUN}/{name}")
    path = pair.write(f"{RUN}/metrics.jsonl", b"x" * 100)
    sent = []
    for size in range(101, 400):
        pair.local.scan()
        sent += [m.size for m in pair.collect() if isinstance(m, PutFile)]
        path.write_bytes(b"x" * size)
    assert pair.local.growing == [f"{RUN}/metrics.jsonl"]
    assert sent == [100, 150, 225, 338]
    pair.local.scan(lambda p: True)
    assert [m.size for m in pair.collect() if isinstance(m, PutFile)] == [399]


def test_a_growing_file_is_sent_as_it_was_when_it_was_looked_at(pair, monkeypatch):
    path = pair.write(f"{RUN}/metrics.jsonl", LARGE)
    real = files_module.file_sha256

    def hash_and_grow(hashed, size=None):
        found = real(hashed, size)
        with open(path, "ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(files_module, "file_sha256", hash_and_grow)
    pair.local.scan()
    assert pair.local.problems == {}
    pair.deliver(pair.collect())
    assert pair.remote.fetch()
    assert (pair.there / RUN / "metrics.jsonl").read_bytes() == LARGE


def test_temporary_files_and_folders_are_left_out(pair):
    pair.write(f"{RUN}/.model.1234.tmp")
    pair.write(f"{RUN}/epoch-5.tmp/weights")
    pair.write(f"{RUN}/tmp")
    pair.local.scan(lambda p: True)
    assert puts(pair.collect()) == [f"{RUN}/tmp"]
    assert pair.local.problems == {}


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_named_and_neither_followed_nor_waited_for(pair, monkeypatch):
    secret = pair.here / "secret"
    secret.write_bytes(b"secret")
    folder = pair.write(f"{RUN}/good").parent
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(secret)
    (folder / "folder-link").symlink_to(pair.here)
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        pair.local.scan(lambda p: True)
    assert puts(pair.collect()) == [f"{RUN}/good"]
    assert sorted(pair.local.problems) == [
        f"{RUN}/{name}" for name in ("fifo", "folder-link", "link", "socket")
    ]


UNSAFE = [b"a\nb", b"a:b", b"con", b"nul.txt", b"end.", b"end ", b"a\\b", b"\xff\xfe", b"\x1b[31m"]


@pytest.mark.parametrize("name", [*UNSAFE, b"a:b.log", b"\xff.jsonl", b"events.out.tfevents.\n"])
def test_an_unsafe_name_is_named_and_others_go_on(pair, name):
    pair.write(f"{RUN}/good")
    with open(os.path.join(os.fsencode(pair.here / RUN), name), "wb") as file:
        file.write(b"x")
    pair.local.scan(lambda p: True)
    assert puts(pair.collect()) == [f"{RUN}/good"]
    assert pair.local.growing == []
    # It travels in the status, as JSON that the other end reads, and is shown on a terminal.
    ((path, why),) = pair.local.problems.items()
    assert f"{path}{why}".isprintable()
    assert why.startswith("not sent: path ")


def test_a_path_that_is_too_long_is_named(pair):
    pair.write(f"{RUN}/" + "/".join(["d" * 200] * 6))
    pair.local.scan(lambda p: True)
    assert pair.collect() == []
    assert "longer than 1024 bytes" in next(iter(pair.local.problems.values()))


def test_files_of_a_folder_that_cannot_be_read_are_not_said_to_be_gone(pair, monkeypatch):
    pair.write(f"{RUN}/a")
    pair.write("store/b")
    pair.bring()
    scandir = os.scandir

    def deny(path):
        if str(path).endswith(RUN):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    assert not pair.local.scan()
    assert pair.local.problems == {RUN: "cannot be read: Permission denied"}
    assert pair.local.is_behind()
    assert pair.collect() == []
