"""The beginning of a file given back to the disk, on the file system that the tests run on."""

from __future__ import annotations

import errno
import os

import pytest

from syncd import holes
from syncd.holes import STEP, data_from, free_until, held, read_from


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "pretrain.log"
    path.write_bytes(b"a" * STEP + b"b" * STEP + b"c" * 100)
    return path


def free(path, end):
    with open(path, "r+b") as file:
        free_until(file.fileno(), end)


def test_what_is_freed_takes_no_space_and_moves_nothing(path):
    before = path.stat()
    free(path, STEP)
    after = path.stat()
    assert after.st_size == before.st_size
    assert after.st_blocks * 512 <= before.st_blocks * 512 - STEP
    assert held(path) == STEP + 100
    with open(path, "rb") as file:
        assert data_from(file.fileno(), 0) == STEP
        assert data_from(file.fileno(), STEP + 1) == STEP + 1
        assert read_from(file, 0, before.st_size, 10) == (STEP, b"b" * 10)
        assert read_from(file, 7, STEP + 3, 10) == (STEP, b"bbb")
        assert read_from(file, 7, STEP, 10) == (STEP, b"")


def test_a_file_of_which_all_is_freed_has_no_data(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a" * STEP)
    free(path, STEP)
    with open(path, "rb") as file:
        assert data_from(file.fileno(), 0) == STEP
    assert held(path) == 0


def test_a_file_without_holes_and_a_missing_one_are_what_they_are(path):
    assert held(path) == 2 * STEP + 100
    assert held(path.with_name("none")) == 0
    assert held(path.parent) == 0


def test_a_look_for_data_leaves_a_buffered_file_where_it_is(path):
    free(path, STEP)
    with open(path, "rb") as file:
        file.seek(2 * STEP - 4000)
        assert file.read(10) == b"b" * 10
        assert read_from(file, 2 * STEP - 3000, 10**9, 10**6)[1] == b"b" * 3000 + b"c" * 100


def test_what_is_freed_while_it_is_read_is_not_returned(path):
    class Freed:
        """A file of which the first step is freed just before it is first read."""

        def __init__(self, file):
            self.file = file
            self.reads = 0

        def read(self, length):
            self.reads += 1
            if self.reads == 1:
                free(path, STEP)
            return self.file.read(length)

        def __getattr__(self, name):
            return getattr(self.file, name)

    with open(path, "rb", buffering=0) as file:
        freed = Freed(file)
        assert read_from(freed, 0, 10**9, 20) == (STEP, b"b" * 20)
        assert freed.reads == 2


def test_a_hole_ends_where_a_block_does(path):
    with pytest.raises(ValueError, match="no multiple"):
        free(path, STEP + 1)


def test_a_system_that_cannot_free_says_so(path, monkeypatch):
    monkeypatch.setattr(holes.ctypes, "CDLL", lambda *args, **how: object())
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        free(path, STEP)
