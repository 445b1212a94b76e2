"""Tests of trainer/config.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.errors import UsageError
from trainer.config import as_json, require


@dataclass(frozen=True, kw_only=True)
class Inner:
    where: Path = Path("a/b")


@dataclass(frozen=True, kw_only=True)
class Outer:
    arms: tuple[str, ...] = ("full", "lp-ft")
    inner: Inner = field(default_factory=Inner)
    index: Path | None = None


def test_a_configuration_is_written_as_plain_json() -> None:
    plain = as_json(Outer())
    assert plain == {"arms": ["full", "lp-ft"], "inner": {"where": "a/b"}, "index": None}
    assert json.loads(json.dumps(plain)) == plain


def test_a_wrong_field_is_named_with_its_value_and_what_would_be_right() -> None:
    require("pretrain", "epochs", 1, holds=True, right="at least 1")
    with pytest.raises(UsageError, match="pretrain: epochs is 0; it must be at least 1"):
        require("pretrain", "epochs", 0, holds=False, right="at least 1")
