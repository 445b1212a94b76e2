"""Tests of trainer/files.py."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.errors import DataError
from trainer.files import read_record, refused, writing


@dataclass(frozen=True, kw_only=True)
class Note:
    count: int


def test_a_record_is_read_and_none_where_there_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    assert read_record(Note, path, what="read the note") is None
    path.write_text('{"count": 3}')
    assert read_record(Note, path, what="read the note") == Note(count=3)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"count": 3', "delimiter"),
        (b'{"count": "x"}', "Note.count is not of type int"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "codec can't decode"),
        (b'{"count": NaN}', "finite"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_it_and_what_next(
    tmp_path: Path, data: bytes, why: str
) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=why) as caught:
        read_record(Note, path, what="read the note", hint="Write it anew.")
    assert caught.value.path == str(path)
    assert str(caught.value).startswith("read the note: ")
    assert str(caught.value).endswith("Write it anew.")


def test_what_the_system_refuses_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"write it: .*there: No such file or directory"),
        writing("write it", tmp_path / "there"),
    ):
        (tmp_path / "nowhere" / "there").write_text("x")


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "Free some space and try again"),
        (errno.EROFS, "Check who may write there"),
        (errno.EACCES, "Check who may write there"),
        (errno.EIO, ""),
    ],
)
def test_the_hint_is_for_the_cause(number: int, hint: str) -> None:
    error = refused("write it", "a", OSError(number, os.strerror(number)))
    assert error.why == os.strerror(number)
    assert error.hint.startswith(hint)
    assert bool(error.hint) == bool(hint)
