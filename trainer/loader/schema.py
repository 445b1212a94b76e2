"""Which columns of the shards are read: those asked for, or all that are numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import pyarrow as pa

from protocol.errors import DataError, UsageError
from trainer.loader.arrow import READ, Shard
from trainer.loader.columns import Layout, is_binary, layout_of, why_unreadable


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout of each column that is read, in order; and why each other one is not."""

    layouts: Mapping[str, Layout]
    left_out: Mapping[str, str]


def choose(shard: Shard, asked: Sequence[str] | None) -> Choice:
    """Return the columns of `shard` to read: those `asked` for; with None, all that can be.

    Raises UsageError when one asked for is not there, is there twice or cannot be read, DataError
    when there is none to read.
    """
    reasons = {name: _why_not(shard.schema, name) for name in dict.fromkeys(shard.schema.names)}
    if asked is not None:
        for name in asked:
            _check_asked(shard, name, reasons)
        chosen, others = list(asked), "not asked for"
    else:
        binary = {field.name for field in shard.schema if is_binary(field.type)}
        reasons |= {
            name: "bytes of unknown meaning: read when asked for by name"
            for name in binary
            if not reasons[name]
        }
        chosen, others = [name for name, reason in reasons.items() if not reason], ""
    if not chosen:
        why = "no column can be read"
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise DataError(READ, path=shard.path, why=f"{why} ({told})" if told else why)
    left_out = {name: reason or others for name, reason in reasons.items() if name not in chosen}
    return Choice(layouts={name: _layout(shard.schema, name) for name in chosen}, left_out=left_out)


def check_same(first: Shard, other: Shard, layouts: Mapping[str, Layout]) -> None:
    """Raise DataError, which names both shards, unless `other` has the same columns as `first`."""
    for name, layout in layouts.items():
        why = _why_not(other.schema, name) if name in other.schema.names else "is missing"
        found = None if why else _layout(other.schema, name)
        if found != layout:
            why = f"column {name} {f'is {found}' if found else why}; {first.path} has {layout}"
            hint = "Shards of one table have the same columns: name the files that belong together."
            raise DataError(READ, path=other.path, why=why, hint=hint)


def _check_asked(shard: Shard, name: str, reasons: Mapping[str, str]) -> None:
    if name not in reasons:
        near = get_close_matches(name, reasons, n=3)
        said = f"Did you mean {' or '.join(near)}?" if near else f"It has {', '.join(reasons)}."
        raise UsageError(READ, path=shard.path, why=f"there is no column {name}", hint=said)
    if reasons[name]:
        raise UsageError(READ, path=shard.path, why=f"column {name}: {reasons[name]}")


def _why_not(schema: pa.Schema, name: str) -> str:
    """Return why the column cannot be read, or ""."""
    places = schema.get_all_field_indices(name)
    if len(places) > 1:
        return f"{len(places)} columns have this name"
    arrow_type = schema.field(places[0]).type
    return "" if layout_of(arrow_type) else why_unreadable(arrow_type)


def _layout(schema: pa.Schema, name: str) -> Layout:
    layout = layout_of(schema.field(name).type)
    assert layout is not None
    return layout
