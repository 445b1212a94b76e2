"""`serve/stages.toml`: what each stage runs, after what, and with which share of the GPU.

    [stages.pretrain]
    command = "python -m trainer pretrain --config trainer.toml"
    gpu = 0.5

    [stages.finetune]
    command = ["python", "-m", "trainer", "finetune"]
    after = ["pretrain"]
    env = { OMP_NUM_THREADS = "2" }
    timeout = "6h"
    retries = 2

A command given as text is run by /bin/sh -c, a list is run as it is; both in the payload's folder.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from protocol.durations import DURATION_HINT, parse_duration
from protocol.errors import ConfigError
from protocol.names import canonical_stage, canonical_stages, suggest
from protocol.schema import load_toml

# A key of many dots costs tomllib the square of their number: seconds at this size.
MAX_BYTES = 128 * 1024


class Resume(StrEnum):
    """What a new attempt of a run finds."""

    CHECKPOINT = "checkpoint"  # its checkpoint folder as it was
    RESTART = "restart"  # an empty checkpoint folder


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage. `gpu` is its share, 0 to 1; `timeout` (of one attempt) and `grace` are seconds.

    `retries` counts further attempts after one that failed, was killed or timed out; a new
    attempt after a lost VM is not one of them.
    """

    name: str
    command: str | tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    timeout: float | None = None
    retries: int = 0
    grace: float = 10.0
    resume: Resume = Resume.CHECKPOINT
    gpu: float = 1.0


_KEYS = {f.name for f in dataclasses.fields(Stage)} - {"name"}


def parse_stages(data: bytes) -> dict[str, Stage]:
    """Parse `stages.toml` into stages by canonical name.

    Raises ConfigError naming the stage, the field, the value and what would be right: also for
    unknown keys, names that collide, an `after` that names no stage, and a cycle.
    """
    what = "read serve/stages.toml"
    try:
        if len(data) > MAX_BYTES:
            raise ConfigError(what, why=f"larger than {MAX_BYTES} bytes")
        value = load_toml(data.decode("utf-8-sig"))
        tables = value.get("stages")
        if not isinstance(tables, dict) or set(value) != {"stages"}:
            raise ConfigError(what, why="it must hold tables [stages.<name>], and nothing else")
        spelled = canonical_stages(tables)
        stages = {name: _stage(name, tables[raw]) for name, raw in spelled.items()}
    except (ValueError, RecursionError) as error:
        # Also for a number of thousands of digits, which Python will not print.
        raise ConfigError(what, why=str(error), hint=_EXAMPLE) from error
    _check_order(stages)
    return stages


_EXAMPLE = 'A stage is a table: [stages.pretrain], and below it command = "python train.py".'


def _stage(name: str, table: Any) -> Stage:
    where = f"stages.toml, stage {name!r}"
    if not isinstance(table, dict):
        raise ConfigError(where, why="not a table")
    for key in sorted(set(table) - _KEYS):
        raise ConfigError(where, why=f"unknown key {key!r}", hint=suggest_key(key))
    env = table.get("env", {})
    after = table.get("after", [])
    after = [after] if isinstance(after, str) else after
    checks: list[tuple[str, Any, bool, str]] = [
        ("command", table.get("command"), _is_command(table.get("command")), "text or a list"),
        ("env", env, _is_env(env), "a table of text, numbers or booleans"),
        ("after", after, _is_texts(after), "a list of stage names"),
        ("retries", table.get("retries", 0), _in(table.get("retries", 0), int, 0, 1000), "0-1000"),
        ("gpu", table.get("gpu", 1.0), _in(table.get("gpu", 1.0), float, 0, 1), "0 to 1"),
        (
            "resume",
            table.get("resume", "checkpoint"),
            table.get("resume", "checkpoint") in list(Resume),
            "checkpoint or restart",
        ),
    ]
    for key, value, right, wanted in checks:
        if not right:
            raise ConfigError(where, why=f"{key} = {value!r}", hint=f"It must be {wanted}.")
    command = table["command"]
    return Stage(
        name=name,
        command=command if isinstance(command, str) else tuple(command),
        env={k: _env_text(v) for k, v in env.items()},
        after=tuple(dict.fromkeys(canonical_stage(a) for a in after)),
        timeout=_timeout(where, table["timeout"]) if "timeout" in table else None,
        retries=table.get("retries", 0),
        grace=_seconds(where, "grace", table.get("grace", 10.0)),
        resume=Resume(table.get("resume", "checkpoint")),
        gpu=float(table.get("gpu", 1.0)),
    )


def suggest_key(key: str) -> str:
    """Return a hint for an unknown key of a stage."""
    return suggest(key, _KEYS).replace("Known stages", "Known keys")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _is_command(value: Any) -> bool:
    words = [value.strip()] if isinstance(value, str) else value
    return _is_texts(words) and bool(words) and not any("\0" in word for word in words)


def _is_env(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(v, str | int | float) and k and "=" not in k and "\0" not in f"{k}{v}"
        for k, v in value.items()
    )


def _env_text(value: str | float) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _in(value: Any, kind: type, low: float, high: float) -> bool:
    right = isinstance(value, int) or (kind is float and isinstance(value, float))
    return right and not isinstance(value, bool) and low <= value <= high


def _timeout(where: str, value: Any) -> float:
    seconds = _seconds(where, "timeout", value)
    if seconds == 0:
        raise ConfigError(where, why="timeout = 0", hint="Leave it out for none.")
    return seconds


def _seconds(where: str, key: str, value: Any) -> float:
    seconds = parse_duration(value)
    if seconds is None:
        raise ConfigError(where, why=f"{key} = {repr(value)[:80]}", hint=DURATION_HINT)
    return seconds


def _check_order(stages: Mapping[str, Stage]) -> None:
    for stage in stages.values():
        for name in stage.after:
            if name not in stages:
                raise ConfigError(
                    f"stages.toml, stage {stage.name!r}",
                    why=f"after names {name!r}, which is not a stage",
                    hint=suggest(name, stages),
                )
    try:
        graphlib.TopologicalSorter({s.name: s.after for s in stages.values()}).prepare()
    except graphlib.CycleError as error:
        cycle = " after ".join(reversed(error.args[1]))
        raise ConfigError(
            "stages.toml", why=f"a cycle: {cycle}", hint="Take one of these out of `after`."
        ) from error
