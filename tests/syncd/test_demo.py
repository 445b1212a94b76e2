"""`syncd demo`, but for the job itself, which `test_end_to_end.py` runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from syncd.demo import _environment


def test_the_demos_stages_run_the_python_that_runs_the_demo(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = shutil.which("python", path=_environment()["PATH"])
    assert found is not None
    assert Path(found).parent == Path(sys.executable).parent


def test_the_demos_daemons_know_nothing_of_the_callers_own_end(monkeypatch):
    monkeypatch.setenv("SYNCD_REMOTE", "drive:mine")
    assert not [name for name in _environment() if name.startswith("SYNCD_")]
