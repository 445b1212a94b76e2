"""A save of several files, one after the other: when all of it is there."""

from __future__ import annotations

from syncd.delivery.files import Found
from syncd.delivery.saves import OFTEN, Saves

RUN = "train.0001.7f3a"


def half_done(saves: Saves, **steps: int) -> bool:
    """Have a folder looked at in which each file is of a step."""
    return saves.is_half_done(
        RUN,
        [
            Found(path=name, size=1, changed_ns=0, made_ns=step, inode=1, mode=0o644)
            for name, step in steps.items()
        ],
    )


def test_the_rest_of_files_that_are_replaced_together_is_waited_for() -> None:
    saves = Saves()
    assert not half_done(saves, model=1, optim=1, config=1)
    assert not half_done(saves, model=2, optim=2, config=1)
    for _ in range(2 * OFTEN):
        assert half_done(saves, model=3, optim=2, config=1)
    assert not half_done(saves, model=3, optim=3, config=1)
    assert not half_done(saves, model=3, optim=3, config=1)


def test_a_file_that_is_replaced_again_and_again_without_the_other_is_by_itself() -> None:
    saves = Saves()
    half_done(saves, latest=1, best=1)
    half_done(saves, latest=2, best=2)
    assert [half_done(saves, latest=step, best=2) for step in (3, 4, 5, 6, 7)] == [
        *[True] * (OFTEN - 1),
        *[False] * (6 - OFTEN),
    ]


def test_files_with_names_of_their_own_are_waited_for_by_nobody() -> None:
    saves = Saves()
    half_done(saves, state=1, one=1)
    half_done(saves, state=2, one=2)
    assert not half_done(saves, state=3, one=2, two=3)
    assert not half_done(saves, state=3, two=3)


def test_a_file_that_is_gone_is_not_waited_for() -> None:
    saves = Saves()
    half_done(saves, model=1, optim=1)
    half_done(saves, model=2, optim=2)
    assert not half_done(saves, model=3)
