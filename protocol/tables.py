"""A benchmark's report as the rows of a table: what both command lines print, and Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.bench import Figure, Report

COLUMNS = ("figure", "value", "goal", "met", "baselines")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure with all its baselines."""

    figure: Figure
    baselines: tuple[tuple[str, float], ...]

    @property
    def verdict(self) -> str:
        return {True: "yes", False: "no", None: ""}[self.figure.met]

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return what stands in the columns."""
        unit = self.figure.unit
        told = "; ".join(f"{name}: {number(value, unit)}" for name, value in self.baselines)
        value = number(self.figure.value, unit)
        return self.figure.name, value, self.figure.goal, self.verdict, told


def rows(figures: Sequence[Figure]) -> Iterator[Row]:
    """Yield each figure once, with the baselines that it stands beside."""
    for _, same in itertools.groupby(figures, key=lambda figure: figure.name):
        found = list(same)
        baselines = tuple((f.baseline_name, f.baseline) for f in found if f.baseline is not None)
        yield Row(figure=found[0], baselines=baselines)


def number(value: float, unit: str) -> str:
    """Return a value with its unit, to three digits; large ones whole."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if unit == "ratio" else f"{text} {unit}"


def unmet(report: Report) -> list[str]:
    """Return the names of the figures whose goals are not met."""
    return [row.figure.name for row in rows(report.figures) if row.figure.met is False]


def markdown(report: Report) -> str:
    """Return a report's machine and table as Markdown."""
    lines = [f"Machine: {', '.join(f'{name} {value}' for name, value in report.machine.items())}."]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows(report.figures):
        cells = row.cells()
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
