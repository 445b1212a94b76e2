"""`trainer finetune`. Its help is in `trainer/cli.py`, which shows it without importing torch."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainer.commands.stage import RunOptions, run_stage
from trainer.finetune import FinetuneConfig, finetune

_CONFIG = FinetuneConfig()
_OPTIONS = RunOptions()


def command(
    config: Annotated[FinetuneConfig, Parameter(name="*")] = _CONFIG,
    options: RunOptions = _OPTIONS,
) -> None:
    run_stage("finetune", finetune, config, options)
