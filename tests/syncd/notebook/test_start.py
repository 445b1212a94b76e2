"""What is installed in a kernel: what pip has left half done is not taken for it, and what is said
of its work is short, and names what is large."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from syncd.notebook.start import (
    SHOWN_PACKAGES,
    _came,
    _keep,
    _kept,
    _rclone_fails,
    _version_of,
)

# In the environment of the tests these are from small to large; the last is in none.
PACKAGES = ["iniconfig-2.1", "pluggy-1.6", "psutil-7.1", "numpy-2.3", "no-such-package-1.0"]


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        (["numpy-2.3"], "installed 1 package: numpy 2.3"),
        (PACKAGES[:2], "installed 2 packages: pluggy 1.6, iniconfig 2.1"),
        (PACKAGES, "installed 5 packages: numpy 2.3, psutil 7.1, pluggy 1.6, iniconfig 2.1, …"),
    ],
)
def test_the_largest_packages_are_named(packages: list[str], told: str) -> None:
    output = f"Collecting x\nSuccessfully installed {' '.join(packages)}\n"
    assert _came(output) == told
    assert told.count(",") <= SHOWN_PACKAGES


def test_where_nothing_was_missing_that_is_said() -> None:
    assert _came("Requirement already satisfied: x\n") == "installed nothing: all was there"


# What a pip that was killed, or a disk that was full, has left


def entry(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"name": "it.whl", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_kept_wheel_is_taken_for_what_its_hash_says_alone(tmp_path: Path) -> None:
    fetched: list[str] = []

    def fetch(name: str, files: Mapping[str, Any]) -> bytes:
        fetched.append(name)
        return b"whole"

    files = {"syncd": entry(b"whole")}
    (tmp_path / "it.whl").write_bytes(b"zeros")  # of the same length
    for _ in range(2):
        assert _kept(tmp_path, "syncd", files, fetch).read_bytes() == b"whole"
    assert fetched == ["syncd"]
    assert [path.name for path in tmp_path.iterdir()] == ["it.whl"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "is missing"),
        ("#!/bin/sh\nexit 0\n", ""),
        ("#!/bin/sh\necho bad >&2; exit 3\n", "bad"),
        ("\0", "rclone: "),
    ],
)
def test_an_rclone_that_does_not_run_is_not_taken_for_installed(
    script: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    if script is not None:
        (tmp_path / "rclone").write_text(script)
        (tmp_path / "rclone").chmod(0o755)
    why = _rclone_fails()
    assert told in why
    assert bool(why) == bool(told)


def test_a_package_without_a_version_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "half_there-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert _version_of("half-there") is None


def test_what_a_cell_has_fetched_takes_the_place_of_what_another_has(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    _keep(folder, {"manifest.json": b"1", "start-1.py": b"one"})
    _keep(folder, {})
    _keep(folder, {"manifest.json": b"2", "start-2.py": b"two"})
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {"manifest.json": b"2", "start-2.py": b"two"}
    assert folder.stat().st_mode & 0o077 == 0
