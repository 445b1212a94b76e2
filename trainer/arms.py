"""The arms of fine-tuning: their names, and which of a run's is the best."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from protocol.errors import ConfigError
from protocol.names import canonical_stage
from protocol.results import StageReport

RANKED_BY = ("validation_accuracy", "validation_macro_accuracy")


class Arm(StrEnum):
    """A way to fine-tune."""

    FULL = "full"
    LP_FT = "lp-ft"
    ALL = "all"  # each of the others


def canonical_arm(arm: str) -> str:
    """Return an arm's name as run ids spell it; what can be no name stays as it is."""
    try:
        return canonical_stage(arm)
    except ConfigError:
        return arm


def best_arm(arms: Mapping[str, StageReport]) -> StageReport:
    """Return the arm of highest validation accuracy, then class-balanced accuracy, then name."""
    names = sorted(arms)
    return arms[max(names, key=lambda name: [arms[name].metrics[metric] for metric in RANKED_BY])]
