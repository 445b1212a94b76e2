"""Tests of trainer/config.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.errors import UsageError
from trainer.arms import Arm
from trainer.config import as_json, require, require_seed, require_threads


@dataclass(frozen=True, kw_only=True)
class Inner:
    where: Path = Path("a/b")
    arm: Arm = Arm.LP_FT


@dataclass(frozen=True, kw_only=True)
class Outer:
    arms: tuple[Arm, ...] = (Arm.FULL, Arm.LP_FT)
    inner: Inner = field(default_factory=Inner)
    index: Path | None = None


def test_a_configuration_is_written_as_plain_json() -> None:
    plain = as_json(Outer())
    inner = {"where": "a/b", "arm": "lp-ft"}
    assert plain == {"arms": ["full", "lp-ft"], "inner": inner, "index": None}
    assert {type(value) for value in (*plain["arms"], *plain["inner"].values())} == {str}
    assert json.loads(json.dumps(plain)) == plain


def test_a_wrong_field_is_named_with_its_value_and_what_would_be_right() -> None:
    require("pretrain", "epochs", 1, holds=True, right="at least 1")
    with pytest.raises(UsageError, match="pretrain: epochs is 0; it must be at least 1"):
        require("pretrain", "epochs", 0, holds=False, right="at least 1")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_cannot_be_kept_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=f"seed is {seed}; it must be from 0 to {2**63 - 1}"):
        require_seed("pretrain", seed)
    require_seed("pretrain", 2**63 - 1)


@pytest.mark.parametrize("threads", [0, 10**6])
def test_a_thread_count_that_cannot_be_had_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {threads}; it must be from 1 to 1024"):
        require_threads("gate", threads)
    require_threads("gate", None)
