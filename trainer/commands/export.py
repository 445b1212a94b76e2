"""`trainer export`. Its help is in `trainer/cli.py`, which shows it without importing torch."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainer.commands.stage import RunOptions, run_stage
from trainer.export import ExportConfig, export

_CONFIG = ExportConfig()
_OPTIONS = RunOptions()


def command(
    config: Annotated[ExportConfig, Parameter(name="*")] = _CONFIG,
    options: RunOptions = _OPTIONS,
) -> None:
    run_stage("export", export, config, options)
