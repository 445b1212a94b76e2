"""`trainer pretrain`. Its help is in `trainer/cli.py`, which shows it without importing torch."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainer.commands.stage import RunOptions, run_stage
from trainer.pretrain import PretrainConfig, pretrain

_CONFIG = PretrainConfig()
_OPTIONS = RunOptions()


def command(
    config: Annotated[PretrainConfig, Parameter(name="*")] = _CONFIG,
    options: RunOptions = _OPTIONS,
) -> None:
    run_stage("pretrain", pretrain, config, options)
