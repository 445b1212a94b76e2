"""What became of one run, from what one end has of it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from protocol.errors import DataError
from protocol.journal import JournalRecord
from protocol.logs import LogEnd, LogStart
from protocol.messages import QueuedCommand
from protocol.paths import Layout
from protocol.states import Result, State
from protocol.status import Status, WaitingLine
from syncd.account import LAST_LINES, read_account
from syncd.log_parts import rotated
from syncd.state import State as Database

RUN_ID = "pretrain.0001.7f3a"
FIRST, SECOND = "w-000001-7f3a9c02", "w-000002-51b0c7de"


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path / "laptop")
    for folder in (layout.private, layout.inbox):
        folder.mkdir(parents=True)
    database = Database(layout.private / "state.db")
    for number, run_id in ((1, RUN_ID), (2, "pretrain.0002.7f3a"), (3, "")):
        line = "run:pretrain" if run_id else "stop:pretrain"
        text = json.dumps(asdict(QueuedCommand(number=number, line=line, run_id=run_id)))
        database.run("INSERT INTO commands VALUES (?, ?)", number, text)
    database.close()
    return layout


def record(layout, state, attempt=0, worker=FIRST, time=1.0, **more):
    written = JournalRecord(
        number=1, line="run:pretrain", state=state, time=time, worker=worker, run_id=RUN_ID,
        attempt=attempt, **more,
    )  # fmt: skip
    with open(layout.journal, "ab") as file:
        file.write(written.encode())


def start(attempt, run_id=RUN_ID):
    return LogStart(run_id=run_id, attempt=attempt, time=1.0, command="train").line()


def end(attempt, cause, time=60.0, run_id=RUN_ID):
    return LogEnd(
        run_id=run_id, attempt=attempt, time=time, seconds=1.0, result=Result.FAILED, cause=cause
    ).line()


def test_every_attempt_is_told_with_its_end_and_its_last_lines(layout):
    record(layout, State.CLAIMED)
    record(layout, State.STARTED, 1, time=10.0)
    record(layout, State.STARTED, 2, time=70.0, cause="attempt 1: exit 7; last line: one")
    record(layout, State.ENDED, 2, time=99.0, result=Result.FAILED, cause="gave up after 2 ...")
    other = "pretrain.0002.7f3a"
    rotated(layout.log("pretrain")).write_bytes(start(1) + b"10%\r20%\r30%\none\n" + end(1, "why"))
    lines = b"".join(b"line %d\n" % n for n in range(20))
    layout.log("pretrain").write_bytes(
        start(1, other) + b"not of it\n" + end(1, "no", run_id=other)
        + start(2) + lines + b"\x1b[31mred\n" + end(2, "exit 7", time=98.0)
    )  # fmt: skip
    account = read_account(layout, RUN_ID)
    assert account == read_account(layout, "1")
    assert (account.command.result, account.command.cause) == (Result.FAILED, "gave up after 2 ...")
    first, second = account.attempts
    assert (first.started, first.ended, first.result) == (10.0, 60.0, Result.FAILED)
    assert (first.cause, first.last_lines) == ("why", ("30%", "one"))
    assert (second.worker, second.ended, second.cause) == (FIRST, 98.0, "exit 7")
    assert len(second.last_lines) == LAST_LINES
    assert second.last_lines[-2:] == ("line 19", "\\x1b[31mred")


def test_without_its_log_the_journal_tells_why_each_attempt_ended(layout):
    record(layout, State.STARTED, 1)
    record(layout, State.STARTED, 2, SECOND, cause=f"attempt 1: VM gone: {FIRST}")
    record(layout, State.ENDED, 2, SECOND, time=9.0, result=Result.KILLED, cause="SIGKILL")
    first, second = read_account(layout, RUN_ID).attempts
    assert (first.worker, first.ended, first.cause) == (FIRST, None, f"VM gone: {FIRST}")
    assert (second.worker, second.ended, second.cause) == (SECOND, 9.0, "SIGKILL")
    assert second.result is Result.KILLED


def test_an_attempt_that_runs_has_no_end(layout):
    record(layout, State.CLAIMED)
    record(layout, State.STARTED, 1)
    layout.log("pretrain").write_bytes(start(1) + b"epoch 1\n")
    account = read_account(layout, RUN_ID)
    (attempt,) = account.attempts
    assert (attempt.ended, attempt.result, attempt.cause) == (None, None, "")
    assert attempt.last_lines == ("epoch 1",)
    assert account.waits_for == ""


def test_what_a_run_waits_for_is_what_the_worker_last_said(layout):
    assert read_account(layout, RUN_ID).waits_for == "a worker to take it up"
    waiting = (WaitingLine(number=1, line="run:pretrain", why="another run of pretrain"),)
    status = Status(time=1.0, worker=FIRST, host="vm", sealed=True, waiting=waiting)
    (layout.private / "status.json").write_text(json.dumps(asdict(status)))
    assert read_account(layout, RUN_ID).waits_for == "another run of pretrain"
    record(layout, State.ENDED, result=Result.STOPPED, cause="by command 3")
    assert read_account(layout, RUN_ID).waits_for == ""


def test_what_is_no_run_has_no_account(layout):
    for name in ("train", "9", "", "pretrain.0009.7f3a"):
        assert read_account(layout, name) is None


def test_a_stages_name_stands_for_its_newest_command(layout):
    assert read_account(layout, "pretrain").command.number == 2


def test_a_command_without_a_run_has_an_account_by_its_number(layout):
    account = read_account(layout, "3")
    assert account.command.number == 3
    assert account.attempts == ()


def test_a_log_that_cannot_be_read_is_named(layout):
    layout.log("pretrain").mkdir()
    with pytest.raises(DataError, match=r"read the log: .*pretrain\.log: Is a directory"):
        read_account(layout, RUN_ID)
