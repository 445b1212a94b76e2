"""Fixtures of the bridge's tests: a laptop's folder, a stand-in for cloudflared, quick retries."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import cloudflared_stand_in
import pytest

from protocol.paths import Layout
from protocol.wire import Role
from syncd.bridge import objects_folder
from syncd.bridge.tunnel import TunnelProcess
from syncd.setup import initialise


@pytest.fixture
def laptop(tmp_path: Path) -> Layout:
    """A laptop's end, made for a bridge."""
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(objects_folder(layout)))
    return layout


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunnels that are started again at once."""
    monkeypatch.setattr(TunnelProcess, "first_pause", 0.01)
    monkeypatch.setattr(TunnelProcess, "most_pause", 0.01)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that puts a shell script on the PATH, before what is there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def cloudflared(
    tmp_path: Path, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Put a stand-in for cloudflared on the PATH; return its folder, for `plan`."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    monkeypatch.setenv("CLOUDFLARED_STAND_IN", str(folder))
    stand_in = shlex.join([sys.executable, cloudflared_stand_in.__file__])
    program("cloudflared", f'exec {stand_in} "$@"')
    return folder
