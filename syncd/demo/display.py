"""The demo's live view: on a terminal a table that is redrawn, elsewhere a line for each change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protocol.states import Result, State
from protocol.status import RunningLine, Status, render_progress, shown
from syncd.view import CommandView


class Display:
    """Shows commands as they go. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._told: dict[int, tuple[State, Result | None]] = {}
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, views: Sequence[CommandView], status: Status | None) -> None:
        """Show the commands as they are now."""
        running = {run.run_id: run for run in status.running} if status else {}
        if self._live:
            self._live.update(_table(views, running), refresh=True)
            return
        for view in views:
            if self._told.get(view.number) == (view.state, view.result):
                continue
            self._told[view.number] = (view.state, view.result)
            state = f"{view.result or view.state}{f': {view.cause}' if view.cause else ''}"
            at = time.monotonic() - self._began
            self._console.print(f"{at:6.1f} s  {view.number}  {shown(view.line):<28} {state}")


def _table(views: Sequence[CommandView], running: dict[str, RunningLine]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("no.", "command", "state", "how it goes"):
        table.add_column(column)
    for view in views:
        run = running.get(view.run_id)
        told = view.cause
        if view.state is State.STARTED and run:
            told = render_progress(run.progress) if run.progress else run.last_line
        style = {State.STARTED: "cyan", State.ENDED: "green"}.get(view.state, "")
        if view.result not in (None, Result.SUCCESS):
            style = "red"
        state = Text(str(view.result or view.state), style=style)
        table.add_row(str(view.number), Text(shown(view.line)), state, Text(told))
    return table
