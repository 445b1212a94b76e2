"""What the commands print for a person. Colours are off when the output is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.logs import one_line, stamp
from protocol.results import RunRecord
from protocol.states import Result, State
from protocol.status import Status, duration, render_status, shown
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


class _PlainConsole(Console):
    """One that leaves it to the caller what to do when the reader of its output has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: no markup, no emoji, no guessed highlights.

    Its prints raise BrokenPipeError when the reader of the output has gone.
    """
    return _PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def _table(*columns: str, whole: int) -> Table:
    """Return a table without lines, the first `whole` columns of which are never folded."""
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place < whole)
    return table


def _state(state: State, result: Result | None) -> Text:
    if result is not None:
        return Text(str(result), style=_STYLES[result])
    return Text(str(state), style="cyan" if state is State.STARTED else "")


def print_status(commands: Sequence[CommandView], worker: Status | None) -> None:
    """Print the newest commands and the worker's status."""
    console = plain_console()
    table = _table("no.", "command", "state", "cause", whole=3)
    if len(commands) > COMMANDS_SHOWN:
        console.print(f"({len(commands) - COMMANDS_SHOWN} older commands are not shown)")
    for view in commands[-COMMANDS_SHOWN:]:
        state = _state(view.state, view.result)
        table.add_row(str(view.number), Text(shown(view.line)), state, Text(one_line(view.cause)))
    console.print(table if commands else "The queue has no commands yet.")
    console.print()
    if worker is None:
        console.print("No worker was heard of yet.")
    else:
        console.print(Text(render_status(worker, now=time.time())), end="")


def print_results(runs: Sequence[RunRecord], *, detailed: bool) -> None:
    """Print a table of runs; with `detailed`, all that each reported."""
    console = plain_console()
    table = _table("run", "result", "took", "ended", "metrics", whole=4)
    for run in runs:
        took = run.ended - run.started if run.ended and run.started else None
        table.add_row(
            run.run_id,
            _state(State.ENDED, run.result),
            duration(took) if took is not None else "",
            stamp(run.ended) if run.ended else "",
            Text(one_line(_metrics(run) or run.cause)),
        )
    console.print(table if runs else "There are no results yet.")
    if detailed:
        for run in runs:
            console.print_json(data=run.to_json())


def _metrics(run: RunRecord) -> str:
    if run.report is None:
        return ""
    verdict = [run.report.verdict] if run.report.verdict else []
    return "  ".join(verdict + [f"{k} {v:.4g}" for k, v in run.report.metrics.items()])


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
