"""What a benchmark prints: figures, each beside its goal and what else could be used instead.

    {"bench": "link", "machine": {...}, "figures": [{"name": "...", "value": 0.4, "unit": "s",
     "goal": "<= 1.0", "met": true, "baseline": 3.1, "baseline_name": "..."}]}

A figure that is compared with several baselines stands there once for each, under one name.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_SENSES: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_GOAL = re.compile(r"(?P<sense><=|>=|<|>) *(?P<number>[0-9]+(\.[0-9]+)?)")


def meets(value: float, goal: str) -> bool:
    """Whether a value meets a goal, a number with its sense (`<= 1.5`). Raises ValueError."""
    match = _GOAL.fullmatch(goal)
    if not match:
        raise ValueError(f"goal {goal!r} is not a number with its sense, such as '<= 1.5'")
    return _SENSES[match["sense"]](value, float(match["number"]))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured value. `goal` is empty for what is only reported.

    Raises ValueError for a goal that is none, and for half a baseline.
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    baseline: float | None = None
    baseline_name: str = ""

    def __post_init__(self) -> None:
        if self.goal:
            meets(self.value, self.goal)
        if (self.baseline is None) != (not self.baseline_name):
            raise ValueError(f"{self.name}: a baseline has a value and a name")

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        return meets(self.value, self.goal) if self.goal else None

    def beside(self, baselines: Mapping[str, float]) -> list[Figure]:
        """Return this figure once for each baseline, name → value; itself when there is none."""
        found = [replace(self, baseline=v, baseline_name=n) for n, v in baselines.items()]
        return found or [self]

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        before = {key: fields.pop(key) for key in ("name", "value", "unit")}
        return {**before, "goal": fields.pop("goal"), "met": self.met, **fields}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run of a benchmark found, and where: `machine` is name → text.

    `schema.decode` reads back what `to_json` wrote; what is met is then computed anew.
    """

    bench: str
    machine: Mapping[str, str]
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        figures = [figure.to_json() for figure in self.figures]
        return {"bench": self.bench, "machine": dict(self.machine), "figures": figures}


def machine() -> dict[str, str]:
    """Describe this machine, and how busy it is: what figures depend on."""
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": str(os.cpu_count() or "?"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
    }
    if hasattr(os, "getloadavg"):
        found["load"] = f"{os.getloadavg()[0]:.1f}"
    return found


def _processor() -> str:
    """The processor's model: where Linux says it, else what the system calls its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8", "replace") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()
