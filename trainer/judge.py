"""Which of two classifiers is better on the same held-out clips, and by how much: pure functions.

Differences are in percentage points, candidate minus opponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError
from trainer.bootstrap import Interval, bootstrap_mean
from trainer.evaluate import Logits, by_corpus

Strings = npt.NDArray[np.str_]


class Verdict(StrEnum):
    """What becomes of a candidate."""

    PROMOTE = "promote"
    HOLD = "hold"


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """A classifier's logits (n, classes) on the held-out clips, and what its classes are."""

    name: str
    classes: tuple[str, ...]
    logits: Logits


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """The clips to judge on: the class `corpus/label` (n,) and the corpus (n,) of each."""

    truth: Strings
    corpus: Strings


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate against an opponent on `clips` clips of the `classes` that both know.

    Accuracies are 0 to 1; `difference` is their difference with its interval; `corpora` is the
    difference by corpus in percentage points.
    """

    accuracy: float
    opponent_accuracy: float
    difference: Interval
    corpora: Mapping[str, float]
    classes: tuple[str, ...]
    clips: int


def compare(
    candidate: Contestant, opponent: Contestant, held_out: HeldOut, *, seed: int, resamples: int
) -> Comparison:
    """Compare two classifiers on the held-out clips whose class both know.

    Classes are matched by name, and both choose among the shared ones alone, so that both are
    asked the same question. Raises DataError when they share no class that a clip has.
    """
    known = set(opponent.classes)
    shared = tuple(name for name in candidate.classes if name in known)
    asked = np.isin(held_out.truth, shared)
    if not asked.any():
        raise DataError(
            f"compare {candidate.name} with {opponent.name}",
            why="no held-out clip is of a class that both know",
            hint="Move the champion away to begin anew with other classes.",
        )
    ours = hits(candidate, held_out.truth, shared)[asked]
    theirs = hits(opponent, held_out.truth, shared)[asked]
    points = by_corpus(100.0 * (ours - theirs), held_out.corpus[asked])
    return Comparison(
        accuracy=float(ours.mean()),
        opponent_accuracy=float(theirs.mean()),
        difference=bootstrap_mean(ours - theirs, seed=seed, resamples=resamples),
        corpora=points,
        classes=shared,
        clips=int(asked.sum()),
    )


def hits(
    contestant: Contestant, truth: Strings, shared: tuple[str, ...]
) -> npt.NDArray[np.float64]:
    """Return 1.0 for each clip (n,) whose class is the contestant's choice among `shared`."""
    place = {name: at for at, name in enumerate(contestant.classes)}
    columns = contestant.logits[:, [place[name] for name in shared]]
    chosen = np.array(shared)[columns.argmax(axis=1)]
    right: npt.NDArray[np.float64] = (chosen == truth).astype(np.float64)
    return right


def majority(held_out: HeldOut, *, train_truth: Strings, train_corpus: Strings) -> Contestant:
    """Return the trivial baseline: for each clip the commonest training class of its corpus.

    It is told the corpus, which a candidate has to find out. Ties go to the first name.
    """
    classes = tuple(np.unique(np.concatenate([train_truth, held_out.truth])).tolist())
    place = {name: at for at, name in enumerate(classes)}
    logits = np.zeros((len(held_out.truth), len(classes)), dtype=np.float32)
    for name in np.unique(train_corpus):
        found, counts = np.unique(train_truth[train_corpus == name], return_counts=True)
        logits[held_out.corpus == name, place[str(found[counts.argmax()])]] = 1.0
    return Contestant(name="the majority class of each corpus", classes=classes, logits=logits)


def judge(
    comparison: Comparison, *, candidate: str, opponent: str, margin: float
) -> tuple[Verdict, str]:
    """Return the verdict and why.

    Promotes when the difference is above 0 and its lower bound above -`margin`, in points.
    """
    interval = comparison.difference
    mean, low, high = (100.0 * value for value in (interval.mean, interval.low, interval.high))
    promoted = mean > 0.0 and low > -margin
    rule = (
        f"needed: above 0, and the lower bound above {-margin:g}"
        if margin
        else ("needed: the lower bound above 0")
    )
    why = (
        f"{candidate} is right on {comparison.accuracy:.1%} and {opponent} on "
        f"{comparison.opponent_accuracy:.1%} of {comparison.clips} held-out clips: "
        f"{mean:+.2f} points, {interval.confidence:.0%} interval {low:+.2f} to {high:+.2f} ({rule})"
    )
    return (Verdict.PROMOTE if promoted else Verdict.HOLD), why
