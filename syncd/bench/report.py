"""Shows what a benchmark found: as a table for a person, or, from its JSON, as Markdown.

python -m syncd.bench.report bench-link-2026-11-30.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.bench import Report
from protocol.errors import DataError, UserError
from protocol.schema import decode, loads
from protocol.tables import COLUMNS, markdown, rows


def print_table(console: Console, report: Report) -> None:
    """Print a report for a person."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows(report.figures):
        style = {True: "green", False: "red", None: ""}[row.figure.met]
        name, value, goal, verdict, told = row.cells()
        table.add_row(name, value, goal, Text(verdict, style=style), told)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in report.machine.items()))


def read_report(path: Path) -> Report:
    """Read a report that was kept. Raises DataError."""
    try:
        return decode(Report, loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError("read a benchmark's report", path=path, why=why) from error


if __name__ == "__main__":
    try:
        for argument in sys.argv[1:]:
            print(markdown(read_report(Path(argument))), end="")
    except UserError as error:
        print(f"syncd.bench.report: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
