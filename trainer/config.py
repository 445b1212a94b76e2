"""What the stages' configurations have in common: how they are checked, and how written down."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SEED = 2**63 - 1
MAX_THREADS = 1024
MAX_COUNT = 10**6


def require(stage: str, field: str, value: object, *, holds: bool, right: str) -> None:
    """Raise UsageError, naming the field, its value and what would be right, unless it holds."""
    if not holds:
        raise UsageError(f"configure {stage}", why=f"{field} is {value!r}; it must be {right}")


def require_seed(stage: str, seed: int) -> None:
    """Raise UsageError unless the seed fits what the seed is kept in: 63 bits."""
    require(stage, "seed", seed, holds=0 <= seed <= MAX_SEED, right=f"from 0 to {MAX_SEED}")


def require_threads(stage: str, threads: int | None) -> None:
    """Raise UsageError unless there can be as many threads; None is torch's own choice."""
    holds = threads is None or 1 <= threads <= MAX_THREADS
    require(stage, "threads", threads, holds=holds, right=f"from 1 to {MAX_THREADS}")


def require_counts(stage: str, config: object, *names: str) -> None:
    """Raise UsageError unless each of the fields, whole numbers, is at least 1 and reachable."""
    for name in names:
        value = getattr(config, name)
        require(stage, name, value, holds=1 <= value <= MAX_COUNT, right=f"from 1 to {MAX_COUNT}")


def as_json(config: DataclassInstance) -> dict[str, Any]:
    """Return a configuration as plain JSON values: paths and enums become strings."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
