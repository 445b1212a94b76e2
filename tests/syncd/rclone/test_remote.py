"""The contract of a Remote, over rclone's local backend and real servers of each kind."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import eventually, tried_until

from protocol.errors import DataError, RemoteError
from syncd.rclone.errors import Unreachable
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import (
    DELETED_AT_ONCE,
    Entry,
    Fatal,
    NotFound,
    RcloneRemote,
    Transient,
)

NAMES = [
    "000001-log-12-ab",
    "with blanks",
    "grüße-日本語",
    "quotes ' and \"",
    "$(touch run) `touch run`",
    "percent %41 #fragment ?query",
    "a;b&c|d",
    "[brackets]",
]


def test_a_file_of_any_name_arrives_whole(place, make_file, tmp_path):
    source = make_file("source", b"content\r\n\x00")
    for number, name in enumerate(NAMES):
        place.remote.upload(source, f"writer-{number}/{name}")
        assert place.remote.list(f"writer-{number}") == [Entry(name, 10, False)]
        path = f"writer-{number}/{name}"
        assert place.remote.read(path, limit=10) == b"content\r\n\x00"
        place.remote.download(path, tmp_path / f"target-{number}", length=10)
        assert (tmp_path / f"target-{number}").read_bytes() == b"content\r\n\x00"
        place.remote.delete(f"writer-{number}", [name])
        assert place.remote.list(f"writer-{number}") == []
    assert not Path("run").exists()


def test_a_local_name_of_any_kind_is_uploaded(place, make_file):
    for name in NAMES:
        place.remote.upload(make_file(name, name.encode()), name)
    assert {entry.name for entry in place.remote.list("")} == set(NAMES)


@pytest.mark.parametrize("size", [0, 20 * 1024 * 1024])
def test_empty_and_large_files_arrive_whole(place, make_file, tmp_path, size):
    content = os.urandom(size)
    place.remote.upload(make_file("source", content), "object")
    assert place.remote.list("") == [Entry("object", size, False)]
    assert place.remote.read("object", limit=size) == content
    place.remote.download("object", tmp_path / "target", length=size)
    assert (tmp_path / "target").read_bytes() == content


def test_a_listing_tells_folders_from_files_and_does_not_descend(place, make_file):
    place.remote.upload(make_file("source", b"1"), "folder/below/file")
    place.remote.upload(make_file("source", b"1"), "file")
    found = {(entry.name, entry.is_dir) for entry in place.remote.list("")}
    assert found == {("folder", True), ("file", False)}


def test_a_missing_folder_is_empty(place):
    assert place.remote.list("none/at/all") == []


def test_a_missing_file_is_not_found(place, tmp_path):
    with pytest.raises(NotFound):
        place.remote.read("none", limit=10)
    with pytest.raises(NotFound):
        place.remote.download("none", tmp_path / "target", length=1)
    assert list(tmp_path.glob("*target*")) == []
    assert list(tmp_path.glob(".*")) == []


def test_a_file_longer_than_the_limit_is_not_read(place, make_file):
    place.remote.upload(make_file("source", b"x" * 3_000_000), "object")
    with pytest.raises(DataError, match="longer than 10 bytes"):
        place.remote.read("object", limit=10)
    assert len(place.remote.read("object", limit=3_000_000)) == 3_000_000


def test_removing_what_is_missing_is_no_error(place):
    place.remote.delete("none", ["none"])
    place.remote.delete("", ["none"])
    place.remote.delete_folder("none")


def test_the_files_that_are_named_are_removed_and_no_others(place, make_file):
    kept = ["x", "*", "[ab]", "sub"]
    doomed = [*NAMES, "?", "a", *(f"{number}" for number in range(DELETED_AT_ONCE))]
    for name in (*kept[:-1], *doomed, "sub/a"):
        place.remote.upload(make_file("source", b"1"), f"writer/{name}")
    place.remote.upload(make_file("source", b"1"), "a")
    place.remote.delete("writer", [*doomed, "none"])
    assert sorted(entry.name for entry in place.remote.list("writer")) == sorted(kept)
    assert [entry.name for entry in place.remote.list("writer/sub")] == ["a"]
    assert {entry.name for entry in place.remote.list("")} == {"writer", "a"}


def test_a_file_that_is_replaced_has_the_new_content_and_stands_there_once(place, make_file):
    for content in (b"old, and longer", b"new", b""):
        place.remote.replace(make_file("source", content), "status.txt")
        assert place.remote.list("") == [Entry("status.txt", len(content), False)]
        assert place.remote.read("status.txt", limit=100) == content


def test_a_folder_is_removed_with_all_in_it(place, make_file):
    for path in ("gone/a", "gone/deep/b", "kept/c"):
        place.remote.upload(make_file("source", b"1"), path)
    place.remote.delete_folder("gone")
    assert [entry.name for entry in place.remote.list("")] == ["kept"]


@pytest.mark.parametrize("folder", ["", "/", "."])
def test_the_whole_remote_is_never_removed(place, folder):
    with pytest.raises(ValueError, match="whole remote"):
        place.remote.delete_folder(folder)


def test_a_remote_that_is_there_passes_the_check(place):
    place.remote.make_root()
    place.remote.check()


def test_the_kind_and_the_local_folder_are_known(place):
    if place.server is None:
        assert (place.remote.kind(), place.remote.local_path()) == ("local", place.root)
    else:
        assert (place.remote.kind(), place.remote.local_path()) == (place.server.kind, None)


def test_threads_use_one_rclone_at_once(place, make_file):
    def round_trip(number: int) -> bytes:
        content = str(number).encode() * 1000
        place.remote.upload(make_file(f"source-{number}", content), f"object-{number}")
        return place.remote.read(f"object-{number}", limit=len(content)) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(32)))
    assert len(place.remote.list("")) == 32
    assert place.rclone.restarts == 0


def test_an_upload_that_is_killed_midway_is_never_taken_for_whole(place, make_file):
    size = 64 * 1024 * 1024
    source = make_file("source", os.urandom(size))
    place.rclone.call("core/bwlimit", {"rate": "8M"}, timeout=10)
    failures: list[Exception] = []

    def upload() -> None:
        try:
            # In a folder that is yet to be made: else, on the same disk, nothing would be copied.
            place.remote.upload(source, "w/object")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    eventually(lambda: any(f.stat().st_size > 1_000_000 for f in place.root.rglob("*")))
    before = place.rclone.pid
    os.kill(before, 9)
    thread.join(10)
    assert [type(error) for error in failures] == [Transient]
    eventually(lambda: place.rclone.pid not in (None, before))
    for entry in place.remote.list("w"):
        assert (entry.name, entry.size) != ("object", size)


def test_rclone_is_started_again_after_it_was_killed(place, make_file):
    place.remote.upload(make_file("source", b"before"), "object")
    os.kill(place.rclone.pid, 9)
    read = tried_until(lambda: place.remote.read("object", limit=10))
    assert read == b"before"
    assert place.rclone.restarts == 1


def test_a_server_that_was_killed_is_used_again_once_it_is_back(server, rclone, rclone_config):
    rclone_config.write_text(server.section("there"))
    remote = RcloneRemote(rclone, server.fs("there"))
    remote.make_root()
    remote.check()
    server.kill()
    # A connection that was kept ends in another way than a new one is refused.
    with pytest.raises(Transient, match=r"refused|EOF|reset|lost"):
        remote.check()
    server.start()
    tried_until(remote.check)


def test_a_server_that_was_away_at_first_is_used_once_it_is_there(server, rclone, rclone_config):
    rclone_config.write_text(server.section("there"))
    remote = RcloneRemote(rclone, server.fs("there"))
    server.kill()
    object_path = f"w-000001-7f3a9c02/000000000001-pack-9-{64 * 'a'}"
    told = set()
    for call in (lambda: remote.list(""), lambda: remote.read(object_path, limit=9)):
        with pytest.raises(Unreachable, match="Nobody answers there") as error:
            call()
        told.add(str(error.value))
    # A remote that is away is told of once, whatever was wanted of it. (S3's may take too long.)
    assert len({text for text in told if "refused" in text}) <= 1
    server.start()
    tried_until(remote.make_root)
    remote.check()


def test_a_wrong_password_is_fatal_and_says_what_to_do(server, rclone, rclone_config, make_file):
    rclone_config.write_text(server.section("there", password="wrong"))
    remote = RcloneRemote(rclone, server.fs("there"))
    for action in (
        remote.check,
        lambda: remote.read("object", limit=1),
        lambda: remote.upload(make_file("source", b"1"), "object"),
    ):
        with pytest.raises(Fatal, match=r"rclone config"):
            action()


def test_a_remote_that_is_not_configured_is_named_with_a_hint(rclone):
    remote = RcloneRemote(rclone, "nobody:folder")
    for action in (remote.check, remote.kind, remote.local_path, remote.make_root):
        with pytest.raises(RemoteError, match=r"nobody.*rclone listremotes"):
            action()


def test_a_missing_folder_fails_the_check_until_it_is_made(rclone, tmp_path):
    remote = RcloneRemote(rclone, str(tmp_path / "none" / "yet"))
    with pytest.raises(RemoteError, match="no such folder"):
        remote.check()
    remote.make_root()
    remote.check()


def test_a_file_is_no_remote(rclone, make_file):
    with pytest.raises(Fatal, match="file not a directory"):
        RcloneRemote(rclone, str(make_file("file", b""))).check()


def test_a_local_remote_may_have_brackets_and_blanks_in_its_path(rclone, make_file, tmp_path):
    root = tmp_path / "a [b] c:d"
    remote = RcloneRemote(rclone, str(root))
    remote.upload(make_file("source", b"12345"), "object")
    assert remote.read("object", limit=5) == b"12345"
    with pytest.raises(DataError, match="longer than"):
        remote.read("object", limit=4)
    assert remote.local_path() == root


def test_an_alias_of_a_local_folder_is_watched_there(rclone, rclone_config, tmp_path):
    rclone_config.write_text(f"[short]\ntype = alias\nremote = {tmp_path}\n")
    remote = RcloneRemote(rclone, "short:")
    assert (remote.kind(), remote.local_path()) == ("alias", tmp_path)


def test_a_connection_string_works_and_its_password_is_never_shown(webdav, rclone, make_file):
    options = dict(line.split(" = ") for line in webdav.section("x").splitlines() if " = " in line)
    secret = options["pass"]
    fs = f":webdav,url='{options['url']}',user={options['user']},pass={secret}:sub"
    remote = RcloneRemote(rclone, fs)
    remote.upload(make_file("source", b"1"), "object")
    assert remote.read("object", limit=1) == b"1"
    assert remote.kind() == "webdav"
    with pytest.raises(NotFound) as caught:
        remote.read("none", limit=1)
    assert secret not in str(caught.value) + repr(remote)


def test_a_missing_source_is_fatal_and_named(rclone, tmp_path):
    remote = RcloneRemote(rclone, str(tmp_path))
    with pytest.raises(Fatal, match="nowhere"):
        remote.upload(tmp_path / "nowhere", "object")


def test_a_file_of_another_length_is_not_downloaded(place, make_file, tmp_path):
    place.remote.upload(make_file("source", b"torn"), "object")
    folder = tmp_path / "visible"
    folder.mkdir()
    with pytest.raises(DataError, match="not whole: 4 of 5 bytes"):
        place.remote.download("object", folder / "target", length=5)
    assert list(folder.iterdir()) == []


def test_on_the_remotes_own_disk_nothing_is_copied(rclone, make_file, tmp_path):
    remote = RcloneRemote(rclone, str(tmp_path / "remote"))
    (tmp_path / "remote").mkdir()
    source = make_file("source", b"bytes")
    remote.upload(source, "object")
    remote.download("object", tmp_path / "target", length=5)
    assert (tmp_path / "remote" / "object").samefile(source)
    assert (tmp_path / "target").samefile(source)
    remote.delete("", ["object"])
    assert (tmp_path / "target").read_bytes() == b"bytes"


def test_a_call_in_another_thread_ends_when_the_connection_closes(tmp_path, make_file):
    rclone = Rclone(tmp_path / "run", bwlimit="1k")
    rclone.start()
    remote = RcloneRemote(rclone, str(tmp_path / "remote"))
    source = make_file("source", os.urandom(10_000_000))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(remote.upload, source, "object")
        eventually(lambda: list((tmp_path / "remote").glob("*")))
        rclone.close()
        with pytest.raises(Fatal, match="closed"):
            call.result(timeout=10)
