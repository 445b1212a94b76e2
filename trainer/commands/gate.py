"""`trainer gate`. Its help is in `trainer/cli.py`, which shows it without importing torch."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainer.commands.stage import RunOptions, run_stage
from trainer.gate import GateConfig, gate

_CONFIG = GateConfig()
_OPTIONS = RunOptions()


def command(
    config: Annotated[GateConfig, Parameter(name="*")] = _CONFIG,
    options: RunOptions = _OPTIONS,
) -> None:
    run_stage("gate", gate, config, options)
