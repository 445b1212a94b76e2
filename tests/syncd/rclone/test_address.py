"""Remotes that are URLs: what is taken, what is refused, and that no password is told."""

from __future__ import annotations

import json

import pytest

from protocol.errors import ConfigError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import Settings, load_settings
from syncd.rclone.address import Address, is_address, is_loopback, parse_address
from syncd.rclone.errors import Transient, from_answer, shown, without_secrets


@pytest.mark.parametrize(
    ("text", "url", "user", "password"),
    [
        ("https://u:p@host/objects", "https://host/objects", "u", "p"),
        ("https://u:p@host:8443/a/b/", "https://host:8443/a/b", "u", "p"),
        ("https://u:p@host", "https://host", "u", "p"),
        ("HTTPS://u:p@Host/Objects", "https://host/Objects", "u", "p"),
        ("http://u:p@127.0.0.1:8766/objects", "http://127.0.0.1:8766/objects", "u", "p"),
        ("http://u:p@localhost:80/", "http://localhost:80", "u", "p"),
        ("http://u:p@[::1]:8766/objects", "http://[::1]:8766/objects", "u", "p"),
        ("https://a%40b:p%3A%2F%40%25%20@host/", "https://host", "a@b", "p:/@% "),
    ],
)
def test_a_url_with_a_user_and_a_password_is_a_remote(text, url, user, password):
    assert is_address(text)
    found = parse_address(text)
    assert (found.url, found.user, found.password) == (url, user, password)
    assert parse_address(found.text()) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("https://host/objects", "no user and password"),
        ("https://secret@host/objects", "no user and password"),
        ("https://u:@host/objects", "no user and password"),
        ("https://", "not a URL of a folder"),
        ("https://u:secret@/objects", "not a URL of a folder"),
        ("https://u:secret@host/objects?x=1", "not a URL of a folder"),
        ("https://u:secret@host/objects#x", "not a URL of a folder"),
        ("https://u:secret@host:99999/objects", "Port out of range"),
        ("https://u:secret@[::1/objects", "Invalid IPv6 URL"),
        ("http://u:secret@gpu.example.org/objects", "unencrypted"),
        ("http://u:secret@192.168.1.2:8766/objects", "unencrypted"),
    ],
)
def test_what_will_not_do_is_refused_without_its_password(text, why):
    with pytest.raises(ConfigError, match=why) as caught:
        Settings(role=Role.WORKER, remote=text)
    assert "secret" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "remote",
    ["drive:syncd", "/folder/https://x", ":webdav,url='https://h':", "https:", "x https://"],
)
def test_what_rclone_calls_a_remote_is_no_url(remote):
    assert not is_address(remote)
    assert Settings(role=Role.WORKER, remote=remote).remote == remote


def test_rclone_is_told_in_its_own_way_with_every_character_in_its_place():
    address = Address("https://h/a'b,c:d", "u'x", "unused")
    assert address.connection_string("OBSCURED-_") == (
        ":webdav,url='https://h/a''b,c:d',vendor='rclone',user='u''x',"
        "pass='OBSCURED-_',pacer_min_sleep='0':"
    )
    assert "unused" not in repr(address)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("https://u:secret@h/objects", "https://h/objects"),
        ("https://u:sec@ret@h/objects", "https://h/objects"),
        ('Mkcol "http://u:secret@h/x": refused', 'Mkcol "http://h/x": refused'),
        (":webdav,user='u',pass='sec''ret,x':f", ":webdav,user='u',pass=...:f"),
        (":webdav,pass=secret,user=u:f", ":webdav,pass=...,user=u:f"),
        ("nothing to hide: mail@example.org", "nothing to hide: mail@example.org"),
    ],
)
def test_passwords_in_a_text_are_blanked(text, found):
    assert without_secrets(text) == found


def test_a_message_shows_the_url_and_no_password():
    address = parse_address("https://u:secret@h/objects")
    assert shown(address.text()) == "https://h/objects"
    assert shown(address.connection_string("obscured")) == "https://h/objects"
    error = from_answer("list", "x", 500, b'{"error": "bad :webdav,pass=\'secret\',user=u: here"}')
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    "why",
    [
        "dial tcp: lookup four-dashed-word-url.trycloudflare.com on 127.0.0.53:53: no such host",
        "HTTP error 530 (530 <none>): status code: 530",
    ],
)
def test_a_url_that_leads_nowhere_any_more_says_where_to_look(why):
    error = from_answer("list", "https://h/objects", 500, json.dumps({"error": why}).encode())
    assert isinstance(error, Transient)
    assert "`syncd bridge --show` prints it" in error.hint


def test_a_setting_that_is_no_text_is_named_without_its_password(tmp_path, monkeypatch):
    environ = {"SYNCD_ROLE": "worker", "SYNCD_REMOTE": "https://u:secret@h/objects\n"}
    with pytest.raises(ConfigError, match=r"\$SYNCD_REMOTE.*not text of one line") as caught:
        load_settings(Layout(tmp_path), {}, environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST."]
)
def test_loopback_is_known_by_each_of_its_names(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "localhost.example.org", "10.0.0.1", "127.0.0.1.example.org"])
def test_other_hosts_are_not_loopback(host):
    assert not is_loopback(host)
