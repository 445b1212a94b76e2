"""The story of `examples/lost_vm/`, in its short form."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import RunFailedError

STORY = Path(__file__).parents[2] / "examples" / "lost_vm" / "story.py"


def load_story() -> Any:
    spec = importlib.util.spec_from_file_location("lost_vm_story", STORY)
    assert spec is not None
    assert spec.loader is not None
    story = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = story
    spec.loader.exec_module(story)
    return story


def test_a_command_of_the_trainer_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    story = load_story()
    with pytest.raises(RunFailedError, match="trainer pool describe") as caught:
        story._trainer("pool", "describe", str(tmp_path / "none"))
    assert "trainer: error: " in str(caught.value)


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_a_vm_dies_at_epoch_11_and_the_run_goes_on_from_epoch_10(
    tmp_path: Path, short: bool
) -> None:
    story = load_story()
    outcome = story.tell(tmp_path, short=short)
    assert outcome.resumed_from_epoch == 10
    assert outcome.attempts == 2
    assert outcome.weights[0] == outcome.weights[1]
    stages = story.STAGES[:1] if short else story.STAGES
    assert outcome.results == dict.fromkeys(stages, "success")
