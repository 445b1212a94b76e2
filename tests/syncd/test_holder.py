"""Who holds the lock of a folder is noted by itself."""

import os

import pytest

from protocol.paths import Layout
from protocol.publish import make_dirs
from syncd.holder import VARIABLE, note_holder, read_holder


@pytest.fixture
def layout(tmp_path):
    made = Layout(tmp_path)
    make_dirs(made.private)
    return made


def test_a_process_notes_itself_and_what_it_was_started_as(layout, monkeypatch):
    assert read_holder(layout) is None
    monkeypatch.setenv(VARIABLE, "as wanted")
    (layout.private / "status.json").touch()
    note_holder(layout)
    holder = read_holder(layout)
    assert holder is not None
    assert holder.process.pid == os.getpid()
    assert holder.process.alive()
    assert holder.made_of == "as wanted"
    assert holder.mark == (layout.private / "status.json").stat().st_mtime_ns


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"\xff", b'{"process": 1, "made_of": ""}'])
def test_a_note_that_is_damaged_is_none(layout, damaged):
    (layout.private / "holder.json").write_bytes(damaged)
    assert read_holder(layout) is None
