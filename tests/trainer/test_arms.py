"""Tests of trainer/arms.py."""

from __future__ import annotations

import pytest

from protocol.results import StageReport
from trainer.arms import best_arm, canonical_arm


def arm(name: str, accuracy: float, macro: float) -> StageReport:
    return StageReport(
        run_id=f"finetune.0009.0000.{name}",
        stage="finetune",
        metrics={"validation_accuracy": accuracy, "validation_macro_accuracy": macro},
    )


def test_a_tie_is_decided_by_balanced_accuracy_and_then_by_name() -> None:
    tied = {"b": arm("b", 0.5, 0.4), "a": arm("a", 0.5, 0.4), "c": arm("c", 0.5, 0.3)}
    assert best_arm(tied).run_id == "finetune.0009.0000.a"
    assert best_arm(tied | {"d": arm("d", 0.5, 0.5)}).run_id == "finetune.0009.0000.d"


@pytest.mark.parametrize(
    ("given", "name"), [("LP_FT", "lp-ft"), ("full", "full"), ("../x", "../x"), ("", "")]
)
def test_an_arm_is_spelt_as_run_ids_do_and_what_can_be_none_stays(given: str, name: str) -> None:
    assert canonical_arm(given) == name
