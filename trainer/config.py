"""What the stages' configurations have in common: how they are checked, and how written down."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def require(stage: str, field: str, value: object, *, holds: bool, right: str) -> None:
    """Raise UsageError, naming the field, its value and what would be right, unless it holds."""
    if not holds:
        raise UsageError(f"configure {stage}", why=f"{field} is {value!r}; it must be {right}")


def as_json(config: DataclassInstance) -> dict[str, Any]:
    """Return a configuration as JSON, with paths as strings."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
