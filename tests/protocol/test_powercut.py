"""Power cuts in the middle of publishing: nothing torn, nothing lost that was said to be there.

What a power cut may leave is told by tests/support/powercut.py, which is tried here on code that
is wrong in ways known to lose files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from unittest.mock import patch

import pytest
from powercut import File, judge
from powercut_recorder import Recorder
from powercut_scenarios import (
    Scenario,
    assert_kept,
    assert_kept_after_kills,
    assert_needed,
    each_sync,
)

from protocol.publish import (
    append_durable,
    fsync_dir,
    make_dirs,
    publish_bytes,
    publish_json,
    remove_leftovers,
    rename_durable,
    temporary_beside,
)

OLD, NEW = b"old " * 8, b"new, and longer " * 8
LINES = [b'{"n": 1, "x": "first"}\n', b'{"n": 2}\n', b'{"n": 3, "x": "the third and last"}\n']


def old_file(root):
    (root / "a").write_bytes(OLD)


def replace(root, done):
    publish_bytes(root / "a", NEW, mode=0o600)
    done("new")


def check_replaced(root, done):
    remove_leftovers(root)
    assert [path.name for path in root.iterdir()] == ["a"]
    data = (root / "a").read_bytes()
    assert data == NEW if done else data in (OLD, NEW)
    if data == NEW:
        assert (root / "a").stat().st_mode & 0o777 == 0o600


def create(root, done):
    publish_json(root / "a.json", {"new": 1})
    done("new")


def check_created(root, done):
    if done or (root / "a.json").exists():
        assert json.loads((root / "a.json").read_bytes()) == {"new": 1}


def check_written(root, done):
    data = (root / "a").read_bytes()
    assert data == NEW if done else data in (OLD, NEW)


def source_and_target(root):
    (root / "a").write_bytes(OLD)
    (root / "source").write_bytes(NEW)


def rename(root, done):
    if (root / "source").exists():
        rename_durable(root / "source", root / "a")
        done("new")


def make_folders(root, done):
    # As a process leaves it that was killed between the two steps of make_dirs.
    (root / "there").mkdir(exist_ok=True)
    make_dirs(root / "there" / "b" / "c")
    done("made")
    publish_bytes(root / "there" / "b" / "c" / "a", NEW)
    done("new")


def check_folders(root, done):
    folder = root / "there" / "b" / "c"
    assert folder.is_dir() or "made" not in done
    if "new" in done:
        assert (folder / "a").read_bytes() == NEW


def append(root, done):
    """Cut off what is torn, and append the lines that are not there.

    Promised is only what is appended here: that a line is seen does not make it durable.
    """
    path = root / "lines"
    there = path.read_bytes() if path.exists() else b""
    whole = there[: there.rfind(b"\n") + 1].splitlines(keepends=True)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, sum(map(len, whole)))
    for number, line in enumerate(LINES):
        if number >= len(whole):
            append_durable(path, line)
            done(str(number + 1))


def check_appended(root, done):
    path = root / "lines"
    data = path.read_bytes() if path.exists() else b""
    # What stands behind the lines that are promised is whole, or torn.
    assert data.startswith(b"".join(LINES[: int(done[-1]) if done else 0]))
    assert len(data) <= len(b"".join(LINES))


def append_where_there_is_no_room(root, done):
    """The disk is full in the middle of the second line, and has room again for the next."""
    append_durable(root / "lines", LINES[0])
    done("1")
    write = os.write

    def half(fd, data):
        if len(data) < len(LINES[1]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: len(data) // 2])

    with patch.object(os, "write", half), pytest.raises(OSError, match="No space"):
        append_durable(root / "lines", LINES[1])
    append_durable(root / "lines", LINES[1])
    done("2")


def leftover(root):
    old_file(root)
    temporary_beside(root / "a").write_bytes(NEW)


def clear(root, done):
    remove_leftovers(root)


SCENARIOS = [
    Scenario(
        name="publish over a file",
        start=old_file,
        act=replace,
        check=check_replaced,
        syncs=[".a.tmp by publish_bytes", "./ by publish_bytes"],
    ),
    Scenario(
        name="publish a new file",
        act=create,
        check=check_created,
        syncs=[".a.json.tmp by publish_json", "./ by publish_json"],
    ),
    Scenario(
        name="rename",
        start=source_and_target,
        act=rename,
        check=check_written,
        syncs=["./ by rename_durable"],
    ),
    Scenario(
        name="make folders",
        act=make_folders,
        check=check_folders,
        syncs=[
            "./ by make_dirs",
            "there by make_dirs",
            "there/b by make_dirs",
            "there/b/c/.a.tmp by publish_bytes",
            "there/b/c by publish_bytes",
        ],
    ),
    Scenario(
        name="append",
        act=append,
        check=check_appended,
        syncs=["lines by append_durable", "./ by append_durable"],
    ),
    Scenario(
        name="append on a full disk",
        act=append_where_there_is_no_room,
        restart=append,
        check=check_appended,
        syncs=["lines by append_durable", "./ by append_durable"],
    ),
    Scenario(
        name="remove leftovers",
        start=leftover,
        act=clear,
        check=check_replaced,
        syncs=[],
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_power_cut_at_any_moment_breaks_no_promise(scenario, tmp_path):
    assert_kept(scenario, tmp_path)


@each_sync(SCENARIOS)
def test_without_this_sync_some_power_cut_breaks_a_promise(scenario, sync, tmp_path):
    assert_needed(scenario, sync, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_and_a_restart_before_the_power_cut_break_no_promise(scenario, tmp_path):
    assert_kept_after_kills(scenario, tmp_path)


# The layer itself


def left(root, act):
    """Return what power cuts in the middle of `act` may leave: each file's bytes, by name."""
    with Recorder(root) as recorder:
        act(root)
    return [
        {path: node.data for path, node in state.items() if isinstance(node, File)}
        for _, state in recorder.recording.cuts()
    ]


def test_a_file_that_is_renamed_before_it_is_synced_may_be_empty_afterwards(tmp_path):
    old_file(tmp_path)

    def forgetful(root):
        (root / "new").write_bytes(NEW)
        rename_durable(root / "new", root / "a")

    assert {"a": b""} in left(tmp_path, forgetful)


def test_bytes_may_be_missing_at_the_end_in_the_middle_or_at_the_start_of_what_was_written(
    tmp_path,
):
    (tmp_path / "a").write_bytes(b"old ")

    def forgetful(root):
        with open(root / "a", "ab") as file:
            file.write(b"1234")

    forms = {state["a"] for state in left(tmp_path, forgetful)}
    assert forms == {
        *(b"old ", b"old 12", b"old 1234"),
        *(b"old \0\0\0\0", b"old 12\0\0", b"old \0\x0034"),
    }


def test_a_file_written_over_in_place_may_be_half_the_one_and_half_the_other(tmp_path):
    (tmp_path / "a").write_bytes(b"oldold")

    def in_place(root):
        with open(root / "a", "r+b") as file:
            file.write(b"newnew")

    forms = {state["a"] for state in left(tmp_path, in_place)}
    assert {b"oldold", b"newnew", b"newold", b"oldnew"} <= forms


def test_of_two_names_either_may_be_lost(tmp_path):
    def make_two(root):
        for name in ("a", "b"):
            with open(root / name, "wb") as file:
                file.write(name.encode())
                file.flush()
                os.fsync(file.fileno())

    found = left(tmp_path, make_two)
    assert all(state in found for state in ({}, {"a": b"a"}, {"b": b"b"}, {"a": b"a", "b": b"b"}))


def test_a_file_that_was_removed_may_be_back_until_its_folder_is_synced(tmp_path):
    old_file(tmp_path)

    def remove(root):
        (root / "a").unlink()
        with open(root / "b", "wb") as file:
            os.fsync(file.fileno())
        fsync_dir(root)
        (root / "b").unlink()

    found = left(tmp_path, remove)
    assert all(state in found for state in ({"a": OLD, "b": b""}, {"b": b""}, {}))


def test_a_file_in_a_folder_that_is_lost_is_lost(tmp_path):
    with Recorder(tmp_path) as recorder:
        (tmp_path / "folder").mkdir()
        publish_bytes(tmp_path / "folder" / "a", NEW)
        recorder.done("published")
    after = [sorted(state) for step, state in recorder.recording.cuts() if step.done]
    assert after == [[], ["folder", "folder/a"]]


def test_a_sync_of_everything_makes_all_durable(tmp_path):
    def write_many(root):
        for name in "abc":
            (root / name).mkdir()
            (root / name / "file").write_bytes(NEW)
        os.sync()

    with Recorder(tmp_path) as recorder:
        write_many(tmp_path)
        recorder.done("synced")
    after = [state for step, state in recorder.recording.cuts() if step.done]
    assert len(after) == 1
    assert sorted(after[0]) == ["a", "a/file", "b", "b/file", "c", "c/file"]


def test_a_mode_that_was_changed_after_the_sync_may_be_lost(tmp_path):
    old_file(tmp_path)
    (tmp_path / "a").chmod(0o644)
    with Recorder(tmp_path) as recorder:
        (tmp_path / "a").chmod(0o755)
    modes = {state["a"].mode for _, state in recorder.recording.cuts()}
    assert modes == {0o644, 0o755}


def test_a_rename_across_folders_is_refused_because_it_is_not_modelled(tmp_path):
    old_file(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotImplementedError, match="across folders"):
        left(tmp_path, lambda root: os.replace(root / "a", root / "folder" / "a"))


def test_a_folder_is_made_again_as_it_was_found(tmp_path):
    (tmp_path / "here" / "empty").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to("empty")
    publish_bytes(tmp_path / "here" / "a", NEW, mode=0o600)
    with Recorder(tmp_path / "here") as recorder:
        pass
    seen = []

    def look(folder, done):
        seen.append({path.name: path.lstat().st_mode for path in folder.iterdir()})
        assert (folder / "a").read_bytes() == NEW
        assert os.readlink(folder / "link") == "empty"

    assert judge(recorder.recording, look).wrong == ""
    assert seen == [{p.name: p.lstat().st_mode for p in (tmp_path / "here").iterdir()}]
