"""Fixtures for what runs in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import Laptop, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A fresh machine, on which nothing of ours is installed."""
    made = Machine(tmp_path / "machine")
    yield made
    made.kill_all()


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    made = Laptop(tmp_path)
    made.end.start()
    made.bridge.start()
    yield made
    made.close()
