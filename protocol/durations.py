"""Durations as a person writes them: seconds, or text with a unit, such as "90m"."""

from __future__ import annotations

import re
from typing import Any

DURATION_HINT = 'It must be seconds, or text such as "90m".'
_DURATION = re.compile(r"(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|d|)\Z")
_TOO_LONG = 1e9
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: Any) -> float | None:
    """Return the seconds that a number, or a text such as 90, 90s, 1.5h or 2d, stands for.

    None for what is no duration, is negative, or is longer than 30 years.
    """
    if isinstance(value, str):
        match = _DURATION.match(value.strip())
        if match is None:
            return None
        value = float(match["value"]) * _UNITS[match["unit"]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _TOO_LONG else None
