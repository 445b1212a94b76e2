"""How long a text means."""

import pytest

from protocol.durations import parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0, 0.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("30m", 1800.0),
        (" 1.5 h ", 5400.0),
        ("2d", 172800.0),
    ],
)
def test_a_number_is_seconds_and_a_text_may_have_a_unit(value, seconds):
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    ["", "m", "-1", "1w", "1e3", "1 h 5", "soon", -1, True, None, [1], float("nan"), 1e9, "40000d"],
)
def test_anything_else_is_no_duration(value):
    assert parse_duration(value) is None
