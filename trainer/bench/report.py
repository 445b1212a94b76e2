"""Prints a benchmark's report for a person: figures, goals, and who else was measured, by part.

`python -m syncd.bench.report report.json` makes Markdown of any benchmark's JSON.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.bench import Report
from protocol.tables import COLUMNS, rows


def print_table(console: Console, report: Report) -> None:
    """Print the report's figures as a table; a line parts what begins with another `part:`."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column != COLUMNS[-1])
    part = ""
    for row in rows(report.figures):
        style = {True: "green", False: "red", None: ""}[row.figure.met]
        name, value, goal, verdict, told = row.cells()
        if part and part != _part(name):
            table.add_row()
        part = _part(name)
        table.add_row(name, value, goal, Text(verdict, style=style), told)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in report.machine.items()))


def _part(name: str) -> str:
    return name.partition(": ")[0]
