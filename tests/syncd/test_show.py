"""What the commands print for a person."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from protocol.queue import encode_script
from protocol.results import RunRecord, StageReport
from protocol.states import Result, State
from protocol.status import EndedLine, Status
from syncd.account import Account, AttemptView
from syncd.show import (
    COMMANDS_SHOWN,
    NO_WORKER,
    LineFormatter,
    plain_console,
    print_account,
    print_log,
    print_record,
    print_results,
    print_status,
)
from syncd.unsent import Unsent
from syncd.view import CommandView


def command(number, state=State.ENDED, result=Result.SUCCESS, cause="", line="run:pretrain"):
    return CommandView(
        number=number, line=line, run_id=f"pretrain.{number:04d}.7f3a", state=state,
        result=result, cause=cause, worker="w", attempt=1, time=1.0,
    )  # fmt: skip


def record(number, **more):
    return RunRecord(
        run_id=f"pretrain.{number:04d}.7f3a", stage="pretrain", line="run:pretrain",
        result=Result.SUCCESS, started=1.0, ended=62.0, **more,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes the output a terminal of so many columns, without colours."""

    def terminal(columns):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return terminal


def test_an_empty_folder_says_what_is_not_there_yet(capsys):
    print_status([], None)
    assert capsys.readouterr().out == f"The queue has no commands yet.\n\n{NO_WORKER}\n"
    print_results([])
    assert capsys.readouterr().out == "There are no results yet.\n"


def test_commands_and_the_worker_are_shown(capsys):
    worker = Status(time=time.time(), worker="w-000001-7f3a9c02", host="vm", sealed=True)
    print_status([command(1), command(2, State.STARTED, None)], worker)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "run:pretrain", "success"]
    assert lines[2].split() == ["2", "run:pretrain", "started"]
    assert any(line.startswith("worker w-000001-7f3a9c02 on vm") for line in lines)


def test_a_command_that_ended_is_told_of_once(capsys):
    ended = tuple(
        EndedLine(number=n, line="run:pretrain", result=Result.SUCCESS, cause="exit 0", ended=1.0)
        for n in (1, 2)
    )
    worker = Status(time=1.0, worker="w-000001-7f3a9c02", host="vm", sealed=True, ended=ended)
    print_status([command(2, cause="exit 0")], worker)
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "run:pretrain" in line] == ["2", "1"]


@pytest.mark.parametrize("columns", [20, 80])
def test_in_a_pipe_or_on_a_narrow_terminal_a_command_is_one_whole_line(capsys, terminal, columns):
    if columns == 20:
        terminal(columns)
    cause = "exit 1; last line: " + "a long one " * 12
    print_status([command(1, result=Result.FAILED, cause=cause), command(2)], None)
    lines = [line for line in capsys.readouterr().out.splitlines() if "run:pretrain" in line]
    assert len(lines) == 2
    assert lines[0].endswith(cause.rstrip())
    assert lines[1] == "2    run:pretrain  success"


def test_on_a_terminal_the_cause_is_folded_and_the_rest_is_not(capsys, terminal):
    terminal(80)
    print_status([command(1, result=Result.FAILED, cause="a long one " * 12)], None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("1    run:pretrain  failed")
    assert " ".join(line[27:].strip() for line in lines[1:4]) == ("a long one " * 12).strip()
    assert not "".join(line[:27] for line in lines[2:4]).strip()
    assert all(len(line) <= 80 for line in lines[1:4])


def test_only_the_newest_commands_are_shown_and_how_many_are_not(capsys):
    print_status([command(n) for n in range(1, COMMANDS_SHOWN + 4)], None)
    out = capsys.readouterr().out
    assert out.startswith("(3 older commands are not shown)\n")
    assert out.count("run:pretrain") == COMMANDS_SHOWN


def test_asked_for_more_each_command_has_its_run_id_and_how_long_it_took(capsys):
    took = replace(command(1), started=10.0, time=75.0)
    waits = command(2, State.QUEUED, None)
    print_status([took, waits], None, most=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["no.", "command", "run", "state", "took", "cause"]
    assert "pretrain.0001.7f3a  success  1 min 5 s" in lines[1]
    assert lines[2].split() == ["2", "run:pretrain", "pretrain.0002.7f3a", "queued"]
    print_status([command(n) for n in range(1, COMMANDS_SHOWN + 4)], None, most=2)
    assert capsys.readouterr().out.startswith(f"({COMMANDS_SHOWN + 1} older commands are not")


def test_what_waits_here_is_told_with_its_age(capsys):
    waits = Unsent(commands=3, bytes=12 * 2**20, since=time.time() - 120)
    print_status([command(1)], None, [], waits)
    told = "to be sent from here: 3 commands, 12.0 MiB, waiting for 2 min 0 s"
    assert told in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "text", ["[bold]x[/bold]", ":smile:", "[/]", "a\nb", "\x1b[31mred", "\x07"]
)
def test_text_from_the_other_end_is_shown_as_it_is_and_commands_no_terminal(capsys, text):
    shown = text.encode("unicode_escape").decode()
    print_status([command(1, result=Result.FAILED, cause=text, line=f"sh:{text}")], None)
    out = capsys.readouterr().out
    assert out.count(shown) == 2
    print_results([record(1, cause=text)])
    print_record(record(1, cause=text))
    assert not {"\x1b", "\x07"} & set(out + capsys.readouterr().out)


@pytest.mark.parametrize("text", ["[bold]x[/bold]", ":smile:", "[/]", "/a/b 12 True"])
def test_a_plain_console_prints_text_as_it_is(capsys, text):
    plain_console().print(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_on_a_terminal_each_metric_has_a_line_and_in_a_pipe_each_run(capsys, terminal):
    long = StageReport(
        run_id="pretrain.0001.7f3a", stage="pretrain",
        metrics={f"a_metric_{n}": n / 3 for n in range(20)},
    )  # fmt: skip
    print_results([record(1, report=long)])
    piped = capsys.readouterr().out.splitlines()
    assert len(piped) == 2
    assert piped[1].endswith("a_metric_18 6  a_metric_19 6.333")
    terminal(100)
    print_results([record(1, report=long)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("pretrain.0001.7f3a  success  1 min 1 s  1970-01-01T00:01:02Z")
    assert [line.split()[-2] for line in lines[1:]] == list(long.metrics)


def test_a_verdict_stands_before_the_metrics_and_details_are_json(capsys):
    report = StageReport(
        run_id="pretrain.0001.7f3a", stage="pretrain", metrics={"accuracy": 0.91234}, verdict="hold"
    )
    print_results([record(1, report=report)])
    print_record(record(1, report=report))
    out = capsys.readouterr().out
    assert out.index("hold") < out.index("accuracy")
    assert "0.9123" in out
    assert '"verdict": "hold"' in out


def test_what_became_of_a_run_is_told_with_every_attempt(capsys):
    attempts = (
        AttemptView(
            attempt=1, worker="w-000001-7f3a9c02", started=1.0, ended=61.0, result=Result.FAILED,
            cause="exit 7; last line: boom", last_lines=("epoch 1", "boom"),
        ),
        AttemptView(
            attempt=2, worker="w-000002-7f3a9c02", started=62.0, ended=None, result=None,
            cause="", last_lines=(),
        ),
    )  # fmt: skip
    line = encode_script("echo 1\necho 2")
    account = Account(
        command=command(4, State.STARTED, None, line=line), attempts=attempts, waits_for=""
    )
    print_account(account)
    assert (
        capsys.readouterr().out
        == """\
pretrain.0004.7f3a  started
command 4: sh: echo 1 ...

attempt 1 on w-000001-7f3a9c02, started 1970-01-01T00:00:01Z, ended 1970-01-01T00:01:01Z after \
1 min 0 s: failed (exit 7; last line: boom)
    | epoch 1
    | boom

attempt 2 on w-000002-7f3a9c02, started 1970-01-01T00:01:02Z: no end is on record

"""
    )
    print_account(replace(account, waits_for="another attempt in 4 s", attempts=()))
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "pretrain.0004.7f3a  started: waits for another attempt in 4 s"


def test_a_log_is_printed_byte_for_byte(tmp_path, capfdbinary):
    data = b"\xff\r 10%\r 20%\n\x1b[31mred\x1b[0m\n"
    (tmp_path / "x.log").write_bytes(data)
    print_log(tmp_path / "x.log", follow=False, lines=None)
    assert capfdbinary.readouterr().out == data


def test_problems_of_this_end_come_first_and_in_one_line_each(capsys):
    print_status([], None, ["2 objects were refused; the last: \x1b[31mred\nblue"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "PROBLEM at this end: 2 objects were refused; the last: \\x1b[31mred\\nblue"


def test_what_a_daemon_logs_reaches_the_terminal_in_one_line():
    formatter = LineFormatter("%(message)s")
    record = logging.LogRecord("syncd", logging.INFO, "", 0, "%s", ("a\nb\x1b[2J\u202e",), None)
    assert formatter.format(record) == "a\\nb\\x1b[2J\\u202e"
