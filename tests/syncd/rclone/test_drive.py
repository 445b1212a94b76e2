"""rclone's own drive backend over a stand-in for Google Drive (`fake_drive`): not Google's."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_drive import FakeDrive
from waiting import tried_until

from syncd.rclone.binary import find_rclone
from syncd.rclone.profiles import DRIVE
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import Fatal, RcloneRemote, Transient

MakeFile = Callable[[str, bytes], Path]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[FakeDrive]:
    with FakeDrive(tmp_path / "drive") as drive:
        yield drive


@pytest.fixture
def remote(
    drive: FakeDrive, tmp_path: Path, rclone_config: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RcloneRemote]:
    for name, value in drive.environ().items():
        monkeypatch.setenv(name, value)
    rclone_config.write_text(drive.section("there"))
    with Rclone(tmp_path / "run", config=rclone_config) as rclone:
        remote = RcloneRemote(rclone, "there:syncd")
        remote.make_root()
        yield remote


def upload_nine(remote: RcloneRemote, source: Path) -> None:
    for number in range(9):
        remote.upload(source, f"w/object-{number}")


def test_what_was_uploaded_is_listed_read_and_deleted_for_good(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile, tmp_path: Path
) -> None:
    assert (remote.kind(), remote.profile()) == ("drive", DRIVE)
    large = random.Random(0).randbytes(20_000_000)  # a resumable upload, in parts
    remote.upload(make_file("small", b"12345"), "w/small")
    remote.upload(make_file("large", large), "w/large")
    assert {(e.name, e.size) for e in remote.list("w")} == {("small", 5), ("large", len(large))}
    assert remote.read("w/small", limit=5) == b"12345"
    remote.download("w/large", tmp_path / "copy", length=len(large))
    assert (tmp_path / "copy").read_bytes() == large
    remote.delete("w", ["small"])
    remote.delete_folder("w")
    assert (drive.names(), drive.trash(), remote.list("")) == ([], 0, [])


def test_an_upload_that_failed_and_is_there_is_not_made_twice(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile
) -> None:
    remote.upload(make_file("source", b"1"), "w/first")
    drive.faults.failed = 1.0
    for _ in range(2):
        remote.upload(make_file("source", b"1"), "w/object")
        assert drive.names().count("object") == 1
    assert drive.answers["backendError"] > 0


def test_two_files_of_one_name_are_both_listed_and_one_is_read(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile
) -> None:
    drive.faults.doubled = 1.0
    remote.upload(make_file("source", b"12"), "object")
    assert drive.names() == ["object", "object"]
    assert {(e.name, e.size) for e in remote.list("")} == {("object", 2)}
    assert remote.read("object", limit=2) == b"12"


def test_two_folders_of_one_name_are_told_and_joined_by_what_the_message_says(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile, rclone_config: Path
) -> None:
    drive.faults.doubled, drive.faults.folders_too = 1.0, True
    remote.upload(make_file("source", b"12"), "w/object")
    drive.faults.heal()
    with pytest.raises(Fatal, match=r"two folders named w,.*`rclone dedupe skip there:syncd`"):
        remote.list("")
    command = [find_rclone(), "--config", rclone_config, "dedupe", "skip", "there:syncd"]
    subprocess.run(command, check=True, capture_output=True)
    assert [entry.name for entry in remote.list("")] == ["w"]
    assert [entry.name for entry in remote.list("w")] == ["object"]
    remote.upload(make_file("source", b"12"), "w/after")
    assert {entry.name for entry in remote.list("w")} == {"object", "after"}


def test_too_many_creations_are_transient_and_the_reason_is_told(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile
) -> None:
    remote.upload(make_file("source", b"1"), "w/first")
    drive.faults.creations_per_second = 0.01
    with pytest.raises(Transient, match="Rate Limit Exceeded"):
        upload_nine(remote, make_file("source", b"1"))
    drive.faults.heal()
    tried_until(lambda: remote.upload(make_file("source", b"1"), "w/object"))
    assert "object" in drive.names()


def test_at_our_pace_none_is_too_many(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile
) -> None:
    drive.faults.creations_per_second = DRIVE.creations_per_second
    for number in range(6):
        remote.upload(make_file("source", b"1"), f"w/object-{number}")
    assert len(drive.names()) == 6
    assert drive.answers["userRateLimitExceeded"] == 0


def test_what_is_listed_late_can_be_read_once_it_is(
    remote: RcloneRemote, drive: FakeDrive, make_file: MakeFile
) -> None:
    remote.upload(make_file("source", b"1"), "w/first")
    drive.faults.lag = 3600.0
    remote.upload(make_file("source", b"1"), "w/object")
    assert [entry.name for entry in remote.list("w")] == ["first"]
    drive.settle()
    assert {entry.name for entry in remote.list("w")} == {"first", "object"}
    assert remote.read("w/object", limit=1) == b"1"
