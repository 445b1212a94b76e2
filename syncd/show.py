"""What the commands print for a person. Colours are off when the output is no terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.logs import one_line, stamp
from protocol.queue import readable
from protocol.results import RunRecord
from protocol.states import Result, State
from protocol.status import Status, duration, render_status, shown
from syncd.account import Account, AttemptView
from syncd.unsent import Unsent
from syncd.view import FOLLOW_SECONDS, CommandView, tail
from syncd.view import follow as follow_log

_STYLES = {
    Result.SUCCESS: "green",
    Result.FAILED: "red",
    Result.KILLED: "red",
    Result.TIMED_OUT: "red",
    Result.FAILED_TO_SPAWN: "red",
    Result.LOST: "red",
    Result.REFUSED: "yellow",
    Result.SKIPPED: "yellow",
    Result.STOPPED: "yellow",
}
COMMANDS_SHOWN = 20
LAST_COLUMN_WIDTH = 30
NO_WORKER = (
    "No worker was heard of yet. Start `syncd watch` at the worker's end, made by `syncd init` "
    "with this end's remote and key."
)


class _PlainConsole(Console):
    """One that leaves it to the caller what to do when the reader of its output has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class LineFormatter(logging.Formatter):
    """Writes each message in one line: what others wrote does not reach the terminal as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = one_line(record.message)
        return super().formatMessage(record)


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: no markup, no emoji, no guessed highlights.

    Its prints raise BrokenPipeError when the reader of the output has gone.
    """
    return _PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table without lines, its last column folded, and at its ends of lines.

    In a pipe, or where a terminal has no room for that column, each row is one line, and whole.
    """
    console = plain_console()
    table = [[Text(column, style="bold") for column in columns], *rows]
    widths = [max(row[place].cell_len for row in table) + 2 for place in range(len(columns) - 1)]
    if console.is_terminal and console.width >= sum(widths) + LAST_COLUMN_WIDTH:
        grid = Table.grid()
        for width in widths:
            grid.add_column(width=width, no_wrap=True)
        grid.add_column(overflow="fold")
        for row in table:
            grid.add_row(*row)
        console.print(grid)
        return
    for *cells, last in table:
        for cell, width in zip(cells, widths, strict=True):
            cell.pad_right(width - cell.cell_len)
        line = Text().join([*cells, Text("  ").join(last.split("\n"))])
        line.rstrip()
        console.print(line, soft_wrap=True)


def _state(state: State, result: Result | None) -> Text:
    if result is not None:
        return Text(str(result), style=_STYLES[result])
    return Text(str(state), style="cyan" if state is State.STARTED else "")


def print_status(
    commands: Sequence[CommandView],
    worker: Status | None,
    problems: Sequence[str] = (),
    unsent: Unsent | None = None,
    *,
    most: int | None = None,
    age: float | None = None,
) -> None:
    """Print this end's problems, the newest commands and the worker's status, each end once.

    `unsent` is what waits here to be sent; `most`, how many commands to show, each then with its
    run id and how long it took; `age`, for how many seconds nothing was heard of the worker (None:
    by its own clock).
    """
    console = plain_console()
    for problem in problems:
        console.print(Text(f"PROBLEM at this end: {one_line(problem)}"), soft_wrap=True)
    newest = commands[-(most or COMMANDS_SHOWN) :]
    if len(commands) > len(newest):
        console.print(f"({len(commands) - len(newest)} older commands are not shown)")
    _print_commands(newest, in_full=most is not None)
    if unsent is not None:
        console.print(unsent.told(time.time()), soft_wrap=True)
    console.print()
    if worker is None:
        console.print(NO_WORKER, soft_wrap=True)
    else:
        numbers = {view.number for view in newest if view.state is State.ENDED}
        rest = replace(worker, ended=tuple(e for e in worker.ended if e.number not in numbers))
        now = time.time() if age is None else worker.time + age
        console.print(Text(render_status(rest, now=now, ago=True)), end="", soft_wrap=True)


def _print_commands(commands: Sequence[CommandView], *, in_full: bool) -> None:
    if not commands:
        plain_console().print("The queue has no commands yet.")
    elif in_full:
        columns = ["no.", "command", "run", "state", "took", "cause"]
        _print_table(columns, [_full_row(view) for view in commands])
    else:
        _print_table(["no.", "command", "state", "cause"], list(map(_command_row, commands)))


def _command_row(view: CommandView) -> list[Text]:
    state = _state(view.state, view.result)
    return [Text(str(view.number)), Text(shown(view.line)), state, Text(one_line(view.cause))]


def _full_row(view: CommandView) -> list[Text]:
    number, command, state, cause = _command_row(view)
    ended = view.state is State.ENDED and view.started is not None and view.time is not None
    took = duration((view.time or 0.0) - (view.started or 0.0)) if ended else ""
    return [number, command, Text(view.run_id), state, Text(took), cause]


def print_results(runs: Sequence[RunRecord]) -> None:
    """Print a table of runs."""
    console = plain_console()
    if runs:
        _print_table(
            ["run", "result", "took", "ended", "metrics, or cause"], list(map(_run_row, runs))
        )
    else:
        console.print("There are no results yet.")


def print_account(account: Account) -> None:
    """Print what became of a run: how it is, and each attempt with its end and its last lines."""
    console, command = plain_console(), account.command
    name = command.run_id or readable(command.line)
    head = [Text(f"{name}  "), _state(command.state, command.result)]
    why = f"waits for {account.waits_for}" if account.waits_for else one_line(command.cause)
    console.print(Text().join([*head, Text(f": {why}" if why else "")]), soft_wrap=True)
    console.print(f"command {command.number}: {readable(command.line)}", soft_wrap=True)
    for attempt in account.attempts:
        console.print()
        console.print(_attempt_line(attempt), soft_wrap=True)
        for line in attempt.last_lines:
            console.print(f"    | {line}", soft_wrap=True)
    console.print()


def _attempt_line(attempt: AttemptView) -> Text:
    told = f"attempt {attempt.attempt} on {attempt.worker}, started {stamp(attempt.started)}"
    if attempt.ended is not None:
        took = duration(attempt.ended - attempt.started)
        told += f", ended {stamp(attempt.ended)} after {took}"
    line = Text(f"{told}: ")
    if attempt.result is not None:
        line.append(_state(State.ENDED, attempt.result))
    elif not attempt.cause:
        line.append("no end is on record")
    cause = one_line(attempt.cause)
    return line.append(f" ({cause})" if cause and attempt.result is not None else cause)


def print_record(run: RunRecord) -> None:
    """Print all that is on record of a run, what it reported included."""
    plain_console().print_json(data=run.to_json())


def _run_row(run: RunRecord) -> list[Text]:
    took = run.ended - run.started if run.ended and run.started else None
    return [
        Text(run.run_id),
        _state(State.ENDED, run.result),
        Text(duration(took) if took is not None else ""),
        Text(stamp(run.ended) if run.ended else ""),
        Text("\n".join(map(one_line, _metrics(run) or [run.cause]))),
    ]


def _metrics(run: RunRecord) -> list[str]:
    if run.report is None:
        return []
    verdict = [run.report.verdict] if run.report.verdict else []
    return verdict + [f"{k} {v:.4g}" for k, v in run.report.metrics.items()]


def print_log(path: Path, *, follow: bool, lines: int | None) -> None:
    """Print a log's bytes as they are; with `follow`, go on until interrupted."""
    out = sys.stdout.buffer
    if not follow:
        out.write(tail(path, lines))
        out.flush()
        return
    for block in follow_log(path, lines=lines):
        if block:
            out.write(block)
            out.flush()
        else:
            time.sleep(FOLLOW_SECONDS)
