from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from syncd.rclone import profiles
from syncd.rclone.profiles import Pace, Profile, profile_for
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

CONFIG = """
[drive]
type = drive
[crypt]
type = crypt
remote = drive:secret
[short]
type = alias
remote = crypt:below
[loop]
type = alias
remote = loop:
[here]
type = alias
remote = {folder}
[bridge]
type = webdav
vendor = rclone
url = http://127.0.0.1:1
[cloud]
type = webdav
vendor = nextcloud
url = http://127.0.0.1:1
[union]
type = union
upstreams = drive: cloud:
"""


@pytest.mark.parametrize(
    ("fs", "profile"),
    [
        ("drive:folder", profiles.DRIVE),
        ("crypt:", profiles.DRIVE),
        ("short:a/b", profiles.DRIVE),
        ("here:", profiles.LOCAL),
        ("/some/folder", profiles.LOCAL),
        ("folder", profiles.LOCAL),
        ("bridge:objects", profiles.BRIDGE),
        ("https://user:password@bridge.invalid/objects", profiles.BRIDGE),
        ("cloud:", profiles.WEBDAV),
        (":s3,provider=Other:bucket", profiles.S3),
        ("union:", profiles.OTHER),
        ("loop:", profiles.OTHER),
        ("nobody:", profiles.OTHER),
    ],
)
def test_a_remote_has_the_profile_of_its_type_or_of_what_it_wraps(
    fs: str, profile: Profile, rclone: Rclone, rclone_config: Path, tmp_path: Path
) -> None:
    """The servers of these do not exist: nobody is asked."""
    rclone_config.write_text(CONFIG.format(folder=tmp_path))
    assert RcloneRemote(rclone, fs).profile() == profile


@pytest.mark.parametrize("kind", ["drive", "", "mega", "union"])
def test_where_two_files_may_have_one_name_or_we_do_not_know_the_target_is_checked(
    kind: str,
) -> None:
    assert profile_for(kind, {}).check_target


@pytest.mark.parametrize("kind", ["local", "bridge", "", "mega", "memory"])
def test_what_may_lie_on_the_machine_of_an_end_is_not_durable(kind: str) -> None:
    assert not profile_for(kind, {}).durable
    assert profile_for("drive", {}).durable


def test_no_profile_breaks_the_promises_made_of_it() -> None:
    """Numbers that others rely on: listings a minute when idle, of which a look makes one; the
    silence after which a worker is called gone."""
    found = [p for p in vars(profiles).values() if isinstance(p, Profile)]
    assert len(found) == 9
    for profile in found:
        assert 0 < profile.poll_seconds <= profile.idle_poll_seconds <= 30
        assert 0 < profile.gather_seconds <= 1
        assert profile.transfers >= 1
    assert 60 / profiles.BRIDGE.idle_poll_seconds <= 20
    assert 60 / profiles.DRIVE.idle_poll_seconds <= 3
    assert profiles.BRIDGE.poll_seconds <= 0.25


def test_a_pace_spaces_what_begins_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Pace(2.0)
    threads = [threading.Thread(target=pace.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == [0.0, 0.5, 1.0, 1.5]
    monkeypatch.setattr(time, "monotonic", lambda: 200.0)
    pace.wait()
    assert slept[-1] == 0.0


def test_what_has_no_pace_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Pace(None)
    for _ in range(100):
        pace.wait()
    assert set(slept) == {0.0}


class RecordingRclone:
    """Answers for a remote of one type; keeps what was asked of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, verb: str, params: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.calls.append((verb, params))
        answers: dict[str, dict[str, Any]] = {
            "config/get": {"type": self.kind},
            "operations/fsinfo": {"Features": {"IsLocal": False}},
        }
        return answers.get(verb, {})


@pytest.mark.parametrize("kind", ["drive", "s3", "mega"])
def test_an_upload_looks_for_its_target_and_keeps_its_pace_by_the_profile(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    (tmp_path / "source").write_bytes(b"1")
    rclone = RecordingRclone(kind)
    remote = RcloneRemote(rclone, "cloud:")  # type: ignore[arg-type]
    for number in range(3):
        remote.upload(tmp_path / "source", f"object-{number}")
    uploads = [params["_config"] for verb, params in rclone.calls if verb == "operations/copyfile"]
    profile = profile_for(kind, {})
    assert [config["NoCheckDest"] for config in uploads] == [not profile.check_target] * 3
    assert all(config["IgnoreTimes"] for config in uploads)
    assert (max(slept) > 0.5) == (profile.creations_per_second is not None)


def test_rclones_own_pace_is_ours_unless_the_person_has_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ours = next(iter(profiles.ENVIRONMENT.items()))
    seen = []
    for number, given in enumerate([None, "7s"]):
        if given:
            monkeypatch.setenv(name, given)
        with Rclone(tmp_path / f"run{number}") as rclone:
            environ = Path(f"/proc/{rclone.pid}/environ").read_bytes().split(b"\0")
        seen += [e.decode().partition("=")[2] for e in environ if e.startswith(name.encode())]
    assert seen == [ours, "7s"]


def test_a_profile_says_all_that_it_holds() -> None:
    """Every field stands in the docstring, which is where a reader looks for its meaning."""
    told = Profile.__doc__ or ""
    assert [f.name for f in dataclasses.fields(Profile) if f"`{f.name}`" not in told] == []
