"""What the commands that run a stage share: where the run is kept, and how its outcome is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from protocol.errors import UsageError
from protocol.results import StageReport
from trainer.console import say
from trainer.run import Run, open_run

Config = TypeVar("Config")
SHOWN_DETAIL = ("arm", "opponent")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run by hand is kept. Under a runner its environment decides, and these do not."""

    output: Path = Path("runs")
    """Folder of artifacts/, store/ and results.json."""

    run_id: str | None = None
    """The run to start or to resume, such as STAGE.0001.0000; by default a new one."""

    resume: bool = False
    """Resume the newest unfinished run of this stage."""

    json: bool = False
    """Print the run's report as JSON, and nothing else, on stdout."""

    def __post_init__(self) -> None:
        if self.run_id and self.resume:
            raise UsageError(
                "choose the run",
                why="--run-id and --resume are both given",
                hint="--run-id alone resumes that run; --resume alone the newest unfinished one.",
            )


def run_stage(
    stage: str, work: Callable[[Config, Run], StageReport], config: Config, options: RunOptions
) -> None:
    """Run a stage, publish its report, and show it on stdout."""
    with open_run(
        stage, output=options.output, run_id=options.run_id, resume=options.resume
    ) as run:
        say(f"run {run.run_id}, attempt {run.attempt}")
        report = work(config, run)
        run.finish(report)
    if options.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
        return
    console = Console()
    console.print(report_table(report))
    for artifact in report.artifacts.values():
        console.print(f"  {run.artifact_dir / artifact.path}", soft_wrap=True, highlight=False)


def report_table(report: StageReport) -> Table:
    """Return a report's verdict, metrics and durations as a table, with a column for each arm."""
    best = report.detail.get("best_arm")
    columns = {f"{name} (best)" if name == best else name: arm for name, arm in report.arms.items()}
    columns = columns or {"": report}
    table = Table(
        "", *columns, title=report.run_id, title_justify="left", show_header=bool(report.arms)
    )
    if report.verdict:
        table.add_row("verdict", report.verdict)
    for name in SHOWN_DETAIL:
        if name in report.detail:
            table.add_row(name, str(report.detail[name]))
    for part, cell in (("metrics", number), ("durations", seconds)):
        shown = [getattr(column, part) for column in columns.values()]
        for name in dict.fromkeys(name for values in shown for name in values):
            cells = [cell(values[name]) if name in values else "" for values in shown]
            table.add_row(name if part == "metrics" else f"{name} took", *cells)
    return table


def number(value: float) -> str:
    """Return a number for a person: whole ones whole, others to four significant digits."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def seconds(value: float) -> str:
    return f"{value:.1f} s"
