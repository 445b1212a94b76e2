"""The cell's own half opens what the laptop locks and seals, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.config import Key
from syncd.notebook.pasted import syncd_unlock
from syncd.notebook.sealed import lock, seal, secret_of

VALUE = {"remotes": ["https://syncd:pässword@host/objects", "drive:syncd"], "rclone": "[drive]\n"}


def test_the_cell_opens_what_was_locked_with_its_key() -> None:
    key = Key.new()
    assert syncd_unlock(key.text(), lock(secret_of(key), VALUE)) == (key.secret, VALUE)


def test_during_a_rotation_either_key_of_the_file_opens_it() -> None:
    before = Key.new()
    after = before.rotated()
    for key in (before, after):
        assert syncd_unlock(after.text(), lock(secret_of(key), VALUE)) == (key.secret, VALUE)


def test_another_key_opens_nothing() -> None:
    assert syncd_unlock(Key.new().text(), lock(secret_of(Key.new()), VALUE)) is None


@pytest.mark.parametrize("text", ["", "no key", "a.b.c", "syncd1.0.é", "\0", "x.y." + "A" * 999])
def test_what_is_no_key_opens_nothing(text: str) -> None:
    assert syncd_unlock(text, lock(secret_of(Key.new()), VALUE)) is None


def test_without_a_key_it_is_open_to_all() -> None:
    assert syncd_unlock("..", lock(secret_of(None), VALUE)) == (b"", VALUE)


def test_no_byte_of_it_can_be_changed() -> None:
    key = Key.new()
    raw = base64.b64decode(lock(secret_of(key), VALUE))
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert syncd_unlock(key.text(), base64.b64encode(changed).decode()) is None


def test_what_is_locked_shows_nothing_of_itself_and_is_another_text_each_time() -> None:
    key = Key.new()
    texts = {lock(secret_of(key), VALUE) for _ in range(8)}
    assert len(texts) == 8
    assert all(b"drive" not in base64.b64decode(text) for text in texts)


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=20))
def test_any_value_comes_back_as_it_was(value: object) -> None:
    key = Key.new()
    assert syncd_unlock(key.text(), lock(secret_of(key), value)) == (key.secret, value)


def test_a_seal_is_of_the_text_that_follows_it() -> None:
    key = Key.new()
    line, _, text = seal(secret_of(key), VALUE).partition(b"\n")
    sealing = hmac.digest(key.secret, b"syncd notebook 1 seal", hashlib.sha256)
    assert json.loads(text) == VALUE
    assert line.decode() == hmac.digest(sealing, text, hashlib.sha256).hex()
