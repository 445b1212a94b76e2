"""Progress of a run: the small JSON file that a stage replaces atomically.

    {"step": 120, "total": 1000, "unit": "step", "message": "loss 0.31"}

Any program may write it to `$SYNCD_PROGRESS_FILE`: write a file beside it, then rename.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.files import read_regular
from protocol.publish import temporary_beside
from protocol.schema import dumps, loads

MAX_BYTES = 16 * 1024
_LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: `step` of `total` (None when unknown), counted in `unit`."""

    step: float
    total: float | None = None
    unit: str = "step"
    message: str = ""

    @property
    def fraction(self) -> float | None:
        """The share done, 0 to 1, or None when there is no total."""
        if not self.total or self.total <= 0:
            return None
        return min(max(self.step / self.total, 0.0), 1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Progress | None:
        """Read what a program wrote; None when unusable: it is a courtesy, not a contract."""
        if not isinstance(value, dict):
            return None
        step, total = _number(value.get("step")), _number(value.get("total"))
        if step is None:
            return None
        return cls(
            step=step,
            total=total,
            unit=_text(value.get("unit"), 40) or "step",
            message=_text(value.get("message"), 200),
        )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= _LARGEST else None


def _text(value: Any, limit: int) -> str:
    return "" if value is None else " ".join(str(value).split())[:limit]


def read_progress(path: Path) -> Progress | None:
    """Read a progress file; None when it is missing, half-written or nonsense."""
    try:
        return Progress.from_json(loads(read_regular(path, MAX_BYTES)))
    except (OSError, ValueError):
        return None


def write_progress(path: Path, progress: Progress) -> None:
    """Replace a progress file atomically; not durably, since it is worth nothing after a crash."""
    temporary = temporary_beside(path)
    temporary.write_bytes(dumps(progress.to_json()))
    os.replace(temporary, path)
