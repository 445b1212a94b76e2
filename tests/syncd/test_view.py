"""What one end knows, read beside its daemon."""

from __future__ import annotations

import codecs
import json
import os
import sqlite3
import threading
from dataclasses import asdict

import pytest
from waiting import eventually

from protocol.errors import ConfigError, DataError, UsageError
from protocol.journal import JournalRecord
from protocol.messages import QueuedCommand
from protocol.paths import Layout
from protocol.queue import MAX_LINE_BYTES, parse_queue
from protocol.states import Result, State
from protocol.status import Status
from syncd import view
from syncd.log_parts import rotate
from syncd.state import State as Database
from syncd.view import (
    append_commands,
    check_stage,
    find_folder,
    follow,
    read_commands,
    read_journal,
    read_problems,
    read_status,
    tail,
    wait_for,
)


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path / "laptop")
    for folder in (layout.private, layout.inbox, layout.serve):
        folder.mkdir(parents=True)
    layout.settings.write_text('role = "controller"\nremote = "x:"\n')
    (layout.serve / "stages.toml").write_text('[stages.hello]\ncommand = "true"\n')
    return layout


@pytest.fixture
def database(layout):
    database = Database(layout.private / "state.db")
    yield database
    database.close()


def know(database, number, line="run:hello", **more):
    message = QueuedCommand(number=number, line=line, run_id=f"hello.{number:04d}.0000", **more)
    database.run("INSERT INTO commands VALUES (?, ?)", number, json.dumps(asdict(message)))


def record(layout, number, state, result=None, **more):
    written = JournalRecord(
        number=number, line="run:hello", state=state, time=1.0, worker="w", result=result, **more
    )
    with open(layout.journal, "ab") as file:
        file.write(written.encode())


# The folder


def test_the_folder_is_found_from_anywhere_inside(layout):
    deep = layout.serve / "a" / "b"
    deep.mkdir(parents=True)
    assert find_folder(deep) == find_folder(layout.root) == layout


def test_a_folder_that_is_none_is_told(tmp_path, layout):
    with pytest.raises(ConfigError, match=r"has a syncd\.toml.*syncd init"):
        find_folder(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_folder(layout.root / "tpyo")  # not the folder around it


# Commands


def test_a_folder_without_a_daemon_has_no_commands(layout):
    assert read_commands(layout) == []
    assert read_journal(layout) == {}
    assert read_status(layout) is None


def test_commands_are_told_with_how_they_are(layout, database):
    know(database, 1)
    know(database, 2)
    know(database, 3, error="line 3: broken")
    record(layout, 1, State.CLAIMED)
    record(layout, 1, State.STARTED, attempt=1)
    record(layout, 1, State.ENDED, Result.FAILED, attempt=1, cause="exit 3")
    record(layout, 2, State.CLAIMED)
    views = read_commands(layout)
    assert [(v.number, v.state, v.result, v.cause) for v in views] == [
        (1, State.ENDED, Result.FAILED, "exit 3"),
        (2, State.CLAIMED, None, ""),
        (3, State.QUEUED, None, "line 3: broken"),
    ]


def test_a_record_that_is_being_written_is_passed_over(layout, database):
    know(database, 1)
    record(layout, 1, State.CLAIMED)
    with open(layout.journal, "ab") as file:
        file.write(b'{"number": 1, "sta')
    assert read_commands(layout)[0].state is State.CLAIMED


def test_reading_goes_on_while_the_daemon_writes(layout, database):
    know(database, 1)
    with database.transaction():
        know(database, 2)
        assert [v.number for v in read_commands(layout)] == [1]
    assert [v.number for v in read_commands(layout)] == [1, 2]


def test_a_state_that_is_being_made_has_no_commands(layout):
    sqlite3.connect(layout.private / "state.db").close()
    (layout.private / "state.db").touch()
    assert read_commands(layout) == []


def test_damage_is_named(layout):
    (layout.private / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match=r"read the state: .*state\.db"):
        read_commands(layout)
    layout.journal.mkdir()
    with pytest.raises(DataError, match=r"read the journal: .*journal\.jsonl"):
        read_journal(layout)


def test_the_status_is_the_workers_newest(layout):
    status = Status(time=1.0, worker="w", host="vm", sealed=True)
    path = layout.private / "status.json"
    path.write_text(json.dumps(asdict(status)))
    assert read_status(layout) == status
    path.write_text("{")
    with pytest.raises(DataError, match="read the status"):
        read_status(layout)


def test_a_stage_is_checked_against_the_stages_served(layout):
    assert check_stage(layout, "Hello ") == "hello"
    with pytest.raises(ConfigError, match=r"stages\.toml: it is not defined there. Did you mean"):
        check_stage(layout, "helo")


# Appending


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b"run:a\n"), (b"", b"run:a\n"), (b"run:b\n", b"run:b\nrun:a\n"),
        (b"run:b", b"run:b\nrun:a\n"), (b"run:b\r\n", b"run:b\r\nrun:a\n"),
        (b"run:b\r", b"run:b\rrun:a\n"), (b"\xff", b"\xff\nrun:a\n"), (b"x", b"x\nrun:a\n"),
    ],
)  # fmt: skip
def test_a_line_is_appended_on_a_line_of_its_own(layout, before, after):
    if before is not None:
        layout.queue.write_bytes(before)
    append_commands(layout, ["run:a"])
    assert layout.queue.read_bytes() == after


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("end", ["", "\r\n"])
def test_a_line_is_appended_in_the_encoding_of_the_file(layout, encoding, end):
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-8-sig": b""}
    layout.queue.write_bytes(marks[encoding] + f"# ä\r\nrun:b{end}".encode(encoding))
    append_commands(layout, ["run:a"])
    assert [line.text for line in parse_queue(layout.queue.read_bytes())] == ["run:b", "run:a"]


def test_lines_of_many_writers_at_once_all_arrive(layout):
    layout.queue.write_bytes(b"run:unfinished")
    threads = [
        threading.Thread(target=append_commands, args=(layout, [f"run:w{n}"])) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [line.text for line in parse_queue(layout.queue.read_bytes())]
    assert texts[0] == "run:unfinished"
    assert sorted(texts[1:]) == sorted(f"run:w{n}" for n in range(20))


def test_a_line_that_no_queue_takes_is_not_appended(layout):
    with pytest.raises(UsageError, match=f"longer than {MAX_LINE_BYTES} bytes"):
        append_commands(layout, ["sh:" + "x" * MAX_LINE_BYTES])
    assert not layout.queue.exists()


def test_a_queue_that_cannot_be_written_is_named(layout):
    layout.queue.mkdir()
    with pytest.raises(ConfigError, match=r"queue\.txt: Is a directory"):
        append_commands(layout, ["run:a"])


# Waiting


def test_waiting_tells_each_change_of_the_first_such_command_and_ends(layout, database):
    know(database, 1)
    told = []

    def wait():
        told.extend((found.number, found.state) for found in wait_for(layout, "run:hello", 1))

    thread = threading.Thread(target=wait)
    thread.start()
    know(database, 2, line="run:other")
    know(database, 3)
    know(database, 4)
    eventually(lambda: told == [(3, State.QUEUED)])
    record(layout, 3, State.CLAIMED)
    eventually(lambda: told[1:] == [(3, State.CLAIMED)])
    record(layout, 3, State.STARTED, attempt=1)
    record(layout, 3, State.ENDED, Result.SUCCESS, attempt=1)
    thread.join(10)
    assert told[-1] == (3, State.ENDED)


def test_waiting_reads_only_what_changed(layout, database, monkeypatch):
    know(database, 1)
    record(layout, 1, State.CLAIMED)
    reads, looks = [], []
    real, sleep = view.read_commands, view.time.sleep
    monkeypatch.setattr(view, "read_commands", lambda layout: reads.append(1) or real(layout))

    def pause(seconds):
        looks.append(1)
        if len(looks) == 20:
            record(layout, 1, State.ENDED, Result.SUCCESS)
        sleep(0)

    monkeypatch.setattr(view.time, "sleep", pause)
    assert [v.state for v in wait_for(layout, "run:hello", 0)] == [State.CLAIMED, State.ENDED]
    assert len(looks) == 20
    assert len(reads) == 2


# Logs


@pytest.fixture
def log(layout):
    return layout.log("hello")


@pytest.mark.parametrize(
    ("content", "lines", "shown"),
    [
        (b"", 3, b""), (b"one\n", 3, b"one\n"), (b"1\n2\n3\n4\n", 2, b"3\n4\n"),
        (b"1\n2\n3", 2, b"2\n3"), (b"1\n2\n", 2, b"1\n2\n"), (b"1\n2\n", 0, b""),
        (b"1\n2\n", None, b"1\n2\n"), (b"\n\n\n", 2, b"\n\n"), (b"\xff\xfe\n\x00\n", 1, b"\x00\n"),
    ],
)  # fmt: skip
def test_the_last_lines_of_a_log(log, content, lines, shown):
    log.write_bytes(content)
    assert tail(log, lines) == shown


@pytest.mark.parametrize("lines", [1, 10, 9_999, 10_000, 20_000])
def test_the_last_lines_of_a_long_log_are_read_from_its_end(log, lines):
    text = [b"line %d %s\n" % (n, b"x" * (n % 90)) for n in range(10_000)]
    log.write_bytes(b"".join(text))
    assert tail(log, lines) == b"".join(text[-lines:])


def test_a_log_that_is_not_there_or_is_none_is_named(log):
    with pytest.raises(DataError, match=r"hello\.log: there is none yet"):
        tail(log, None)
    log.mkdir()
    with pytest.raises(DataError, match=r"hello\.log: Is a directory"):
        tail(log, None)


class Follower:
    """Reads what `follow` yields, up to its next pause."""

    def __init__(self, path, lines=None):
        self.blocks = follow(path, lines=lines)

    def read(self):
        return b"".join(iter(self.blocks.__next__, b""))


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def test_a_log_is_followed_from_its_last_lines(log):
    log.write_bytes(b"1\n2\n3\n")
    follower = Follower(log, 2)
    assert follower.read() == b"2\n3\n"
    assert follower.read() == b""
    append(log, b"4\n")
    assert follower.read() == b"4\n"


def test_a_log_that_comes_later_is_followed_from_its_beginning(log):
    follower = Follower(log, 2)
    assert follower.read() == b""
    append(log, b"1\n2\n3\n")
    assert follower.read() == b"1\n2\n3\n"


def test_a_log_is_followed_across_rotations(log):
    log.write_bytes(b"1\n")
    follower = Follower(log)
    assert follower.read() == b"1\n"
    append(log, b"2\n")
    rotate(log, limit=1)
    assert follower.read() == b"2\n"
    append(log, b"3\n")
    assert follower.read() == b"3\n"


def test_what_was_added_just_before_a_rotation_is_not_missed(log, monkeypatch):
    log.write_bytes(b"1\n")
    follower = Follower(log)
    assert follower.read() == b"1\n"
    real = view._has_left

    def add_and_rotate(file, path):
        found = real(file, path)
        monkeypatch.undo()
        append(log, b"2\n")
        rotate(log, limit=1)
        append(log, b"3\n")
        return found

    monkeypatch.setattr(view, "_has_left", add_and_rotate)
    assert follower.read() + follower.read() + follower.read() == b"2\n3\n"


def test_a_log_that_was_cut_goes_on_from_its_new_end(log):
    log.write_bytes(b"a long line\n")
    follower = Follower(log)
    follower.read()
    os.truncate(log, 0)
    follower.read()
    append(log, b"new\n")
    assert follower.read() == b"new\n"


def test_the_problems_of_a_controller_are_those_that_its_daemon_wrote(tmp_path):
    layout = Layout(tmp_path)
    assert read_problems(layout) == []
    layout.private.mkdir()
    layout.problems.write_text('["one", "two"]')
    assert read_problems(layout) == ["one", "two"]
    for wrong in ("{}", "[", ""):
        layout.problems.write_text(wrong)
        with pytest.raises(DataError, match=r"problems\.json"):
            read_problems(layout)
