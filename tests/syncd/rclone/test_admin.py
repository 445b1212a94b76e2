"""Administration of remotes through rclone-python, with the real rclone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import RemoteError, UsageError
from syncd.rclone.admin import Admin
from syncd.rclone.remote import RcloneRemote, Transient


@pytest.fixture
def admin(tmp_path):
    folder = tmp_path / "with blanks; $(touch run)"
    folder.mkdir()
    return Admin(config=folder / "rclone.conf")


def test_a_remote_that_was_created_exists_and_is_listed(admin):
    assert admin.remotes() == []
    admin.create("cloud", "local")
    assert admin.remotes() == ["cloud"]
    assert (admin.exists("cloud"), admin.exists("clou")) == (True, False)


def test_the_options_of_a_remote_reach_the_configuration(admin):
    admin.create("dav", "webdav", {"url": "http://127.0.0.1:1/a~b", "vendor": "other"})
    text = admin._config.read_text()
    assert "url = http://127.0.0.1:1/a~b\n" in text
    assert "vendor = other\n" in text


def test_a_created_remote_can_be_used(admin, tmp_path, rclone_config, rclone):
    Admin(config=rclone_config).create("short", "alias", {"remote": str(tmp_path)})
    assert RcloneRemote(rclone, "short:").local_path() == tmp_path


def test_two_configurations_do_not_mix(admin, tmp_path):
    other = Admin(config=tmp_path / "other.conf")
    admin.create("one", "local")
    other.create("two", "local")
    assert (admin.remotes(), other.remotes()) == (["one"], ["two"])


def test_a_remote_is_not_created_twice(admin):
    admin.create("cloud", "local")
    with pytest.raises(UsageError, match="it exists"):
        admin.create("cloud", "local")


@pytest.mark.parametrize(
    "name", ["", "-rf", "a b", "a:b", "$(touch run)", "`touch run`", 'a"b', "a\nb", "a;b", "x" * 65]
)
def test_a_name_that_a_shell_would_understand_is_refused(admin, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for action in (
        lambda: admin.create(name, "local"),
        lambda: admin.create("good", name),
        lambda: admin.exists(name),
        lambda: admin.about(name),
    ):
        with pytest.raises(UsageError, match="not safe on a command line"):
            action()
    assert not Path("run").exists()
    assert admin.remotes() == []


@pytest.mark.parametrize(
    "value", ["$HOME", "`id`", 'a"b', "a\\b", "a\nb", "%PATH%", "a!b", "é", ""]
)
def test_a_value_that_a_shell_would_understand_is_refused(admin, value):
    with pytest.raises(UsageError, match="not safe"):
        admin.create("dav", "webdav", {"url": value})


@pytest.mark.parametrize("key", ["pass", "client_secret", "token", "secret_access_key", "key"])
def test_a_secret_is_not_put_on_a_command_line(admin, key):
    with pytest.raises(UsageError, match="secret"):
        admin.create("cloud", "drive", {key: "value"})


def test_a_type_that_rclone_lacks_is_an_error_of_the_remote(admin):
    with pytest.raises(RemoteError, match="nosuchtype"):
        admin.create("cloud", "nosuchtype")


def test_a_remote_tells_its_space(admin):
    admin.create("here", "local")
    assert admin.about("here")["total"] > 0


def test_the_space_of_a_missing_remote_is_an_error_with_a_hint(admin):
    with pytest.raises(RemoteError, match="rclone listremotes"):
        admin.about("nobody")


def test_the_space_of_an_unreachable_remote_is_transient(admin):
    admin.create("dead", "webdav", {"url": "http://127.0.0.1:9"})
    with pytest.raises(Transient, match="refused"):
        admin.about("dead")


def test_the_version_is_that_of_our_binary(admin):
    assert admin.version().startswith("v1.")


def test_the_environment_is_as_it_was_afterwards(admin):
    before = dict(os.environ)
    admin.remotes()
    with pytest.raises(RemoteError):
        admin.about("nobody")
    assert dict(os.environ) == before
