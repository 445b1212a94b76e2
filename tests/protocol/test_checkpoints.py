"""Which checkpoint is the newest safe one, and since when work is at risk."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from protocol.checkpoints import (
    CheckpointFile,
    CheckpointIndex,
    Proof,
    at_risk_since,
    is_superseded,
    newest_safe,
)
from protocol.schema import decode, dumps, loads


def file(made: float, *, said: bool = True, proof: Proof | None = Proof.HASH) -> CheckpointFile:
    return CheckpointFile(
        name=f"{made:g}.pt", size=5, sha256="0" * 64, made=made, said=said, proof=proof
    )


SAFE_UP_TO = {
    "nothing was made": ([], None),
    "all are safe": ([file(1), file(2)], 2),
    "the newest has no proof": ([file(1), file(2, proof=None)], 1),
    "the newest was not said": ([file(1), file(2, said=False)], 1),
    "an older one has no proof": ([file(1), file(2, proof=None), file(3)], 1),
    "the oldest has no proof": ([file(1, proof=None), file(2)], None),
    "they come in another order": ([file(3, proof=None), file(2), file(1)], 2),
}


@pytest.mark.parametrize("case", SAFE_UP_TO)
def test_a_run_is_safe_up_to_the_newest_file_that_is_safe_with_all_before_it(case: str) -> None:
    files, made = SAFE_UP_TO[case]
    newest = newest_safe(files)
    assert (newest.made if newest else None) == made


SUPERSEDED = {
    "nothing is left": ([], False),
    "only older ones are left": ([file(50)], False),
    "a newer one is safe": ([file(200)], True),
    "a newer one has no proof": ([file(200, proof=None)], False),
    "an older one that is left has no proof": ([file(50, proof=None), file(200)], False),
    "what was made beside the newer one has no proof": (
        [file(200), file(201, proof=None)],
        False,
    ),
    "one after the newer one has no proof": ([file(200), file(300, proof=None)], True),
    "the one between is whole": ([file(150), file(200), file(201, proof=None)], True),
}


@pytest.mark.parametrize("case", SUPERSEDED)
def test_what_a_run_has_taken_away_is_needed_until_a_newer_checkpoint_is_safe(case: str) -> None:
    left, superseded = SUPERSEDED[case]
    assert is_superseded(100.0, left) is superseded


def test_all_work_of_an_attempt_is_at_risk_until_it_has_a_safe_file_of_its_own() -> None:
    assert at_risk_since(None, 100.0) == 100.0
    assert at_risk_since(file(90.0), 100.0) == 100.0
    assert at_risk_since(file(130.0), 100.0) == 130.0


def test_the_index_is_read_as_it_was_written() -> None:
    index = CheckpointIndex(runs={"pretrain.0001.7f3a": (file(1), file(2, proof=None))})
    assert decode(CheckpointIndex, loads(dumps(asdict(index)))) == index
