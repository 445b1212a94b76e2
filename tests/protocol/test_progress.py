import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.progress import MAX_BYTES, Progress, read_progress, write_progress
from protocol.status import render_progress


def test_progress_is_read_back_as_it_was_written(tmp_path: Path):
    progress = Progress(step=120, total=1000, unit="clip", message="loss 0.31")
    write_progress(tmp_path / "p.json", progress)
    assert read_progress(tmp_path / "p.json") == progress
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"step": "3"}', b'{"step": true}', b'{"step": NaN}', b"\xff\xfe"]
)
def test_half_written_or_nonsense_progress_is_none(tmp_path: Path, data: bytes):
    path = tmp_path / "p.json"
    path.write_bytes(data)
    assert read_progress(path) is None


def test_missing_and_oversized_progress_is_none(tmp_path: Path):
    path = tmp_path / "p.json"
    assert read_progress(path) is None
    path.write_bytes(json.dumps({"step": 1, "message": "x" * MAX_BYTES}).encode())
    assert read_progress(path) is None


@pytest.mark.parametrize(
    ("step", "total", "fraction"),
    [(5, 10, 0.5), (11, 10, 1.0), (-1, 10, 0.0), (5, None, None), (5, 0, None), (5, -1, None)],
)
def test_the_fraction_stays_between_0_and_1(
    step: float, total: float | None, fraction: float | None
):
    assert Progress(step=step, total=total).fraction == fraction


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([[]])


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("step", "total", "unit", "message"), VALUES))
)
@example({"step": 10**400})
@example({"step": 1, "total": 10**400})
@example({"step": 1, "unit": "a\nb\x1b[2J"})
def test_whatever_a_program_wrote_is_none_or_one_line(value: dict[str, Any]):
    progress = Progress.from_json(value)
    if progress is None:
        return
    assert math.isfinite(progress.step)
    assert render_progress(progress).isprintable()
