"""`syncd init`: what it makes, what it keeps, and what it refuses."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from protocol.errors import ConfigError, RemoteError, UsageError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import Key, load_key, load_settings
from syncd.delivery.payload import read_stages
from syncd.setup import absolute, initialise


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "new" / "laptop")


@pytest.fixture(autouse=True)
def configured(tmp_path, monkeypatch):
    """rclone's configuration, in which there is a remote `drive`."""
    path = tmp_path / "rclone.conf"
    path.write_text("[drive]\ntype = local\n")
    monkeypatch.setenv("RCLONE_CONFIG", str(path))


def test_a_remote_that_rclone_does_not_know_is_refused_with_those_it_has(tmp_path):
    layout = Layout(tmp_path / "end")
    with pytest.raises(RemoteError, match=r"no remote 'drvie'\. It has: drive\."):
        initialise(layout, role=Role.CONTROLLER, remote="drvie:syncd")
    assert not layout.root.exists()


def test_a_controllers_end_has_all_that_a_person_needs(layout):
    told = initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    assert load_settings(layout, {}, {}).remote == "drive:syncd"
    assert load_key(layout, {}) is not None
    assert str(layout.key) in told
    assert list(read_stages(layout.serve)) == ["hello"]
    assert layout.queue.read_text().startswith("# One command a line")


def test_a_second_time_keeps_key_queue_and_stages_and_takes_the_settings(layout):
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    layout.queue.write_text("run:hello\n")
    (layout.serve / "stages.toml").write_text("mine")
    key = load_key(layout, {})
    initialise(layout, role=Role.CONTROLLER, remote="drive:other")
    assert load_key(layout, {}) == key
    assert layout.queue.read_text() == "run:hello\n"
    assert (layout.serve / "stages.toml").read_text() == "mine"
    assert load_settings(layout, {}, {}).remote == "drive:other"


def test_a_second_time_keeps_the_settings_that_are_not_given(layout):
    initialise(layout, role=Role.WORKER, remote="drive:syncd", unsealed=True)
    mine = layout.settings.read_text().replace("# shell = true", "shell = false")
    layout.settings.write_text(mine)
    initialise(layout, role=Role.WORKER, remote="drive:other", unsealed=True)
    settings = load_settings(layout, {}, {})
    assert (settings.remote, settings.shell) == ("drive:other", False)


def test_an_end_that_was_at_work_keeps_its_remote_and_its_key(layout, tmp_path):
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    (layout.private / "state.db").touch()
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    with pytest.raises(UsageError, match="rclone copy drive:syncd drive:other"):
        initialise(layout, role=Role.CONTROLLER, remote="drive:other")
    (tmp_path / "key").write_text(Key.new().text())
    with pytest.raises(UsageError, match="another key"):
        initialise(layout, role=Role.CONTROLLER, remote="drive:syncd", key_file=tmp_path / "key")


def test_a_worker_takes_the_controllers_key(layout, tmp_path, monkeypatch):
    monkeypatch.delenv("SYNCD_KEY", raising=False)
    key = Key.new()
    (tmp_path / "key").write_text(key.text())
    ways = {
        "file": (tmp_path / "key", ""),
        "stdin": (Path("-"), f"{key.text()}"),
        "environment": (None, ""),
    }
    for way, (key_file, text) in ways.items():
        worker = Layout(tmp_path / way)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        if way == "environment":
            monkeypatch.setenv("SYNCD_KEY", key.text())
        initialise(worker, role=Role.WORKER, remote="drive:syncd", key_file=key_file)
        monkeypatch.delenv("SYNCD_KEY", raising=False)
        assert load_key(worker, {}) == key
        assert not worker.queue.exists()
        assert not worker.serve.exists()


def test_a_worker_without_a_key_is_told_where_to_get_it(layout, monkeypatch):
    monkeypatch.delenv("SYNCD_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--key-file with the controller's \.syncd/key"):
        initialise(layout, role=Role.WORKER, remote="drive:syncd")
    assert not layout.root.exists()


def test_a_wrong_key_file_is_named_and_nothing_is_made(layout, tmp_path):
    (tmp_path / "key").write_text("syncd1.nonsense")
    with pytest.raises(ConfigError, match=rf"read the key: {tmp_path}/key: it is not a key"):
        initialise(layout, role=Role.WORKER, remote="d:", key_file=tmp_path / "key")
    assert not layout.root.exists()


def test_an_unsealed_end_says_so_loudly(layout):
    told = initialise(layout, role=Role.WORKER, remote="drive:syncd", unsealed=True)
    assert "NOT SEALED" in told
    assert load_key(layout, {}) is None
    assert load_settings(layout, {}, {}).unsealed
    key = layout.root / "key"
    key.write_text(Key.new().text())
    initialise(layout, role=Role.WORKER, remote="drive:syncd", key_file=key)
    assert not load_settings(layout, {}, {}).unsealed


def test_unsealed_is_refused_where_a_key_would_be_used_all_the_same(layout, tmp_path):
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    with pytest.raises(UsageError, match="there is a key, which would be used"):
        initialise(layout, role=Role.CONTROLLER, remote="drive:syncd", unsealed=True)
    with pytest.raises(UsageError, match="do not go together"):
        initialise(layout, role=Role.WORKER, remote="d:", unsealed=True, key_file=tmp_path / "key")


def test_an_end_that_was_at_work_does_not_become_the_other_one(layout):
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")
    (layout.private / "state.db").touch()
    with pytest.raises(UsageError, match="it is the controller's end, and has been at work"):
        initialise(layout, role=Role.WORKER, remote="drive:syncd", key_file=layout.key)
    initialise(layout, role=Role.CONTROLLER, remote="drive:syncd")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"syncd init: .*file"):
        initialise(Layout(tmp_path / "file" / "x"), role=Role.CONTROLLER, remote="drive:syncd")


@pytest.mark.parametrize(
    "remote",
    [
        "drive:", "drive:syncd", "my drive:a/b", "x:", ":local:/tmp/x", "C:\\x",
        ":webdav,url=http://localhost:8080/dav,user=me:", ":webdav,url='https://x/y':a",
        "drive,shared_with_me:x",
    ],
)  # fmt: skip
def test_what_rclone_calls_a_remote_stays_as_it_is(remote):
    assert absolute(remote) == remote


@pytest.mark.parametrize(
    "remote", ["folder", "./a:b", "a/b:c", "../x", "/tmp/a:b", "a,b", "with blank", " padded "]
)
def test_a_local_folder_is_meant_from_here(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute(remote) == os.path.normpath(tmp_path / remote.strip())


def test_a_home_folder_is_meant_as_a_shell_means_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("~/remote") == "/home/me/remote"
    with pytest.raises(UsageError, match="~nobody-of-that-name"):
        absolute("~nobody-of-that-name/x")


def test_an_empty_remote_is_refused(layout):
    with pytest.raises(ConfigError, match="remote is empty"):
        initialise(layout, role=Role.CONTROLLER, remote=" ")
