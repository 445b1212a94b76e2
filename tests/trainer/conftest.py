"""Fixtures of the trainer's tests: real pool and runs, made once a session; one torch thread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.export import ExportConfig, export
from trainer.finetune import FinetuneConfig, finetune
from trainer.model import EncoderConfig
from trainer.pool.build import build_pool
from trainer.pool.format import Pool, open_pool
from trainer.pretrain import PretrainConfig, pretrain
from trainer.run import Run, open_run


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real pool: six corpora, 2249 clips. Not to be written to."""
    folder = tmp_path_factory.mktemp("pool")
    build_pool(folder)
    return folder


@pytest.fixture(scope="session")
def pool(pool_path: Path) -> Pool:
    return open_pool(pool_path)


@pytest.fixture
def standalone(tmp_path: Path) -> Callable[[str], Run]:
    """Opens a new run of a stage by hand, all in one output folder."""

    def opener(stage: str) -> Run:
        return open_run(stage, output=tmp_path / "runs", environ={})

    return opener


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory, pool_path: Path) -> Path:
    """An output folder with small real runs, pretrain to export. Not to be written to.

    `finetune.0001` is good, `finetune.0002` learnt for longer, `finetune.0003` for too short; the
    exports of the same numbers ship their best arms. Nothing has been judged.
    """
    output = tmp_path_factory.mktemp("finished") / "runs"
    encoder = EncoderConfig(width=32, depth=1, heads=2)
    small: dict[str, Any] = {"pool": pool_path, "threads": 1}
    with open_run("pretrain", output=output, environ={}) as run:
        run.finish(pretrain(PretrainConfig(epochs=2, encoder=encoder, **small), run))
    for epochs in (14, 30, 3):
        with open_run("finetune", output=output, environ={}) as run:
            config = FinetuneConfig(epochs=epochs, probe_epochs=2, **small)
            run.finish(finetune(config, run))
        with open_run("export", output=output, environ={}) as run:
            run.finish(export(ExportConfig(**small), run))
    return output


@pytest.fixture
def runs(finished_runs: Path, tmp_path: Path) -> Path:
    """A copy of `finished_runs` to work in."""
    return shutil.copytree(finished_runs, tmp_path / "runs")
