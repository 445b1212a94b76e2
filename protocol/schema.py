"""Reading dataclasses from JSON that another machine, or a person, wrote."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from protocol.errors import UserError

T = TypeVar("T")


def decode(cls: type[T], value: Any) -> T:
    """Build the dataclass `cls` from JSON, checking every field's type.

    Unknown keys are passed over (a newer writer), missing ones take their defaults.
    Raises ValueError naming the field.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{cls.__name__} is not a JSON object")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kwargs = {
        name: _decode_as(hints[name], value[name], f"{cls.__name__}.{name}")
        for name in fields
        if name in value
    }
    try:
        return cls(**kwargs)
    except (TypeError, ValueError, UserError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _decode_as(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _decode_as(inner, value, where)
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {k: _decode_as(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is not a list")
        return tuple(_decode_as(args[0], v, where) for v in value)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type[Any], hint), value)
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where} is not of type {hint.__name__}")
    return value
