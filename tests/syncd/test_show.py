"""What the commands print for a person."""

from __future__ import annotations

import time

import pytest

from protocol.results import RunRecord, StageReport
from protocol.states import Result, State
from protocol.status import EndedLine, Status
from syncd.show import (
    COMMANDS_SHOWN,
    NO_WORKER,
    plain_console,
    print_log,
    print_results,
    print_status,
)
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
    print_results([], detailed=False)
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


@pytest.mark.parametrize(
    "text", ["[bold]x[/bold]", ":smile:", "[/]", "a\nb", "\x1b[31mred", "\x07"]
)
def test_text_from_the_other_end_is_shown_as_it_is_and_commands_no_terminal(capsys, text):
    shown = text.encode("unicode_escape").decode()
    print_status([command(1, result=Result.FAILED, cause=text, line=f"sh:{text}")], None)
    out = capsys.readouterr().out
    assert out.count(shown) == 2
    print_results([record(1, cause=text)], detailed=True)
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
    print_results([record(1, report=long)], detailed=False)
    piped = capsys.readouterr().out.splitlines()
    assert len(piped) == 2
    assert piped[1].endswith("a_metric_18 6  a_metric_19 6.333")
    terminal(100)
    print_results([record(1, report=long)], detailed=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("pretrain.0001.7f3a  success  1 min 1 s  1970-01-01T00:01:02Z")
    assert [line.split()[-2] for line in lines[1:]] == list(long.metrics)


def test_a_verdict_stands_before_the_metrics_and_details_are_json(capsys):
    report = StageReport(
        run_id="pretrain.0001.7f3a", stage="pretrain", metrics={"accuracy": 0.91234}, verdict="hold"
    )
    print_results([record(1, report=report)], detailed=True)
    out = capsys.readouterr().out
    assert out.index("hold") < out.index("accuracy")
    assert "0.9123" in out
    assert '"verdict": "hold"' in out


def test_a_log_is_printed_byte_for_byte(tmp_path, capfdbinary):
    data = b"\xff\r 10%\r 20%\n\x1b[31mred\x1b[0m\n"
    (tmp_path / "x.log").write_bytes(data)
    print_log(tmp_path / "x.log", follow=False, lines=None)
    assert capfdbinary.readouterr().out == data
