"""Reading JSON and TOML, and dataclasses from them, that another machine, or a person, wrote."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from protocol.errors import UserError

T = TypeVar("T")

MAX_DEPTH = 64
_INT_LIMIT = 2**63


def dumps(value: Any, *, separators: tuple[str, str] = (",", ":")) -> bytes:
    """Return JSON that `loads` accepts, in ASCII and one line.

    Text that is not Unicode (in Python, a file's name in another encoding) gets a `?` for each
    such character. Raises ValueError for a number that is not finite.
    """
    text = json.dumps(value, separators=separators, allow_nan=False)
    if "\\ud" in text:  # surrogates: pairs are well, single ones are not
        whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        text = json.dumps(json.loads(whole), separators=separators, allow_nan=False)
    return text.encode("ascii")


def loads(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON that can be written, stored and copied again, whatever wrote it.

    Raises ValueError when it is not UTF-8 JSON, is nested more than `max_depth` deep, or holds a
    number that is not finite or text that is not Unicode (a lone surrogate).
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check(value, max_depth)
    return value


def _check(value: Any, levels: int) -> None:
    """Raise ValueError for what `loads` refuses; lists and objects are at most `levels` deep."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    elif isinstance(value, dict | list):
        if levels == 0:
            raise ValueError("nested too deeply")
        for each in value:
            _check(each, levels - 1)
        for each in value.values() if isinstance(value, dict) else ():
            _check(each, levels - 1)


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError that names a line, RecursionError for what is nested deeply."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Of what the text ends in, the parser says that it is the end.
        last = text.rstrip().count("\n") + 1
        told = str(error).replace("(at end of document)", f"(at the end, line {last})")
        raise ValueError(told) from error


def decode(cls: type[T], value: Any) -> T:
    """Build the dataclass `cls` from JSON, checking every field's type.

    Unknown keys are passed over (a newer writer), missing ones take their defaults. An int fits
    64 bits, a float is finite. Raises ValueError naming the field.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{cls.__name__} is not a JSON object")
    kwargs = {
        name: _decode_as(hint, value[name], f"{cls.__name__}.{name}")
        for name, hint in _hints(typing.cast(Any, cls)).items()
        if name in value
    }
    try:
        return cls(**kwargs)
    except (TypeError, ValueError, UserError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """The type of each field; to find it costs more than to decode a value."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


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
    if hint in (int, float):
        return _number(hint, value, where)
    if not isinstance(value, hint):
        raise ValueError(f"{where} is not of type {hint.__name__}")
    return value


def _number(hint: type[int] | type[float], value: Any, where: str) -> int | float:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ValueError(f"{where} does not fit 64 bits")
    if not whole and not (hint is float and isinstance(value, float) and math.isfinite(value)):
        raise ValueError(f"{where} is not of type {hint.__name__}, or not finite")
    return hint(value)
