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
from trainer.run import Run, open_run

Config = TypeVar("Config")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run by hand is kept. Under a runner its environment decides, and these do not."""

    output: Path = Path("runs")
    """Folder of artifacts/, store/ and results.json."""

    run_id: str | None = None
    """The run to start or to resume, such as pretrain.0001.0000; by default a new one."""

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
        report = work(config, run)
        run.finish(report)
    if options.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        Console().print(report_table(report))


def report_table(report: StageReport) -> Table:
    """Return a report's verdict, metrics (its arms' too), durations and artefacts as a table."""
    table = Table("what", "value", title=report.run_id, title_justify="left", show_header=False)
    if report.verdict:
        table.add_row("verdict", report.verdict)
    for name, value in report.metrics.items():
        table.add_row(name, f"{value:.4f}")
    for arm, inner in report.arms.items():
        for name, value in inner.metrics.items():
            table.add_row(f"{arm}: {name}", f"{value:.4f}")
    for name, seconds in report.durations.items():
        table.add_row(f"{name} took", f"{seconds:.1f} s")
    for role, artifact in report.artifacts.items():
        table.add_row(role, artifact.path)
    return table
