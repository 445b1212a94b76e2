"""`syncd doctor --drill`: do the drills in turn, and say for each whether what must hold held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import UserError
from syncd.doctor.drills import DRILLS, Drill
from syncd.doctor.scene import DrillError, Scene, SkippedError


class Verdict(StrEnum):
    """How a drill went."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A drill that was done: `must` is what had to hold, `why` it failed, or was done in part."""

    drill: str
    verdict: Verdict
    seconds: float
    must: str
    why: str = ""


def do_drills(scene: Scene) -> Iterator[Outcome]:
    """Do every drill, each after the other; one that fails keeps none from being done."""
    for drill in DRILLS:
        yield _do(drill, scene)


def _do(drill: Drill, scene: Scene) -> Outcome:
    began, scene.now = time.monotonic(), drill.name
    verdict, why = Verdict.PASSED, ""
    try:
        why = drill.run(scene) or ""
    except SkippedError as error:
        verdict, why = Verdict.SKIPPED, str(error)
    except (DrillError, UserError, OSError) as error:
        verdict, why = Verdict.FAILED, str(error)
    seconds = round(time.monotonic() - began, 1)
    return Outcome(drill=drill.name, verdict=verdict, seconds=seconds, must=drill.must, why=why)
