from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointing import Vm
from file_pair import Pair

from syncd.delivery import takes


@pytest.fixture
def pair(tmp_path):
    """A worker's folder and another end's."""
    pair = Pair(tmp_path)
    yield pair
    for state in pair.states:
        state.close()


@pytest.fixture
def vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    """A worker whose files count as soon as they are there."""
    monkeypatch.setattr(takes, "SETTLE_SECONDS", 0.0)
    vm = Vm(tmp_path)
    yield vm
    vm.state.close()
