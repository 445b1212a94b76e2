"""The encoder that fine-tuning starts from: pretrained, the champion's, or untrained."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from protocol.errors import UsageError
from trainer.bundle import BASE
from trainer.champion import load_champion
from trainer.config import require
from trainer.model import ClipEncoder, EncoderConfig, load_encoder
from trainer.run import Run


class Base(StrEnum):
    """Where the encoder comes from."""

    PRETRAIN = "pretrain"  # the pretraining run that this run builds on
    CHAMPION = "champion"  # the encoder in the champion's ship bundle
    SCRATCH = "scratch"  # untrained


@dataclass(frozen=True, kw_only=True)
class BaseEncoder:
    """The encoder to start from, and the run ids of the stages that it comes from."""

    encoder: ClipEncoder
    inputs: Mapping[str, str]


def load_base(
    base: Base, run: Run, *, length: int, seed: int, from_run: str | None = None
) -> BaseEncoder:
    """Return a verified encoder of clips of `length` values.

    `from_run` names the pretraining run, `seed` decides the weights of an untrained encoder.
    Raises UsageError when there is no champion to start from or the encoder's clips are of another
    length, DataError when a file is not the one that was reported.
    """
    if base is Base.PRETRAIN:
        found = _pretrained(run, from_run)
    elif base is Base.CHAMPION:
        found = _of_champion(run)
    else:
        found = _untrained(length, seed)
    require(
        "finetune",
        "the encoder's length",
        found.encoder.config.length,
        holds=found.encoder.config.length == length,
        right=f"{length}, the length of the pool's clips",
    )
    return found


def _pretrained(run: Run, from_run: str | None) -> BaseEncoder:
    run_id = run.input_run("pretrain", from_run)
    encoder, _ = load_encoder(run.input_artifact("pretrain", run_id, "encoder"))
    return BaseEncoder(encoder=encoder, inputs={"pretrain": run_id})


def _of_champion(run: Run) -> BaseEncoder:
    champion = load_champion(run.store)
    if champion is None:
        raise UsageError(
            "start from the champion's encoder",
            path=run.store,
            why="there is no champion yet",
            hint="Start from --base pretrain; the gate makes the first champion.",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / BASE
        path.write_bytes(champion.bundle.read(BASE))
        encoder, _ = load_encoder(path)
    return BaseEncoder(encoder=encoder, inputs={"export": champion.promotion.run_id})


def _untrained(length: int, seed: int) -> BaseEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BaseEncoder(encoder=ClipEncoder(EncoderConfig(length=length)), inputs={})
