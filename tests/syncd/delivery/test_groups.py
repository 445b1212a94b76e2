"""Which checkpoint files are safe together, which may go, and what takes the place of what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncd.delivery.groups import (
    Gone,
    Group,
    Kept,
    is_proved,
    is_whole,
    may_be_said,
    newest_safe,
    replaced,
    succeeds,
    unneeded,
)

SENT = 9
OLD = Kept(
    path="store/checkpoints/train.0001.7f3a/1.pt",
    sha256="1" * 64,
    size=1,
    mode=0o644,
    made_ns=1_000,
    inode=1,
    first=1,
    last=1,
    pack=3,
    proved=5.0,
)
NEW = replace(OLD, path="store/checkpoints/train.0001.7f3a/2.pt", made_ns=2_000, first=2, last=2)
SIDE = replace(NEW, path="store/checkpoints/train.0001.7f3a/2.json", made_ns=2_001)
FIRST = Group(number=1, files=1, size=1, brought=1, pack=3)
SECOND = Group(number=2, files=2, size=2, brought=3, pack=3)
BOTH = [FIRST, SECOND]


def test_a_group_is_safe_once_all_of_it_is_proved_and_it_is_said_on_the_remote() -> None:
    assert newest_safe([OLD, NEW, SIDE], BOTH, SENT) == SIDE
    assert newest_safe([OLD, replace(NEW, proved=None), SIDE], BOTH, SENT) == OLD
    assert newest_safe([OLD, NEW, SIDE], [FIRST, replace(SECOND, pack=SENT + 1)], SENT) == OLD
    assert newest_safe([OLD], [replace(FIRST, pack=0)], SENT) is None
    assert newest_safe([], [], SENT) is None


def test_a_group_of_which_a_file_is_missing_or_gone_is_not_safe() -> None:
    lacking = replace(SECOND, missing={"3.pt": "it keeps changing in place"})
    assert newest_safe([OLD, NEW, SIDE], [FIRST, lacking], SENT) == OLD
    assert newest_safe([OLD, NEW], BOTH, SENT) == OLD
    assert not is_whole([NEW], SECOND)
    assert not is_whole([], replace(SECOND, files=0))


def test_a_file_that_is_in_two_groups_counts_in_both() -> None:
    kept, second = replace(OLD, last=2, proved=None), replace(SECOND, files=3)
    assert newest_safe([kept, NEW, SIDE], [FIRST, second], SENT) is None
    assert not is_proved([kept, NEW, SIDE], second)
    assert is_proved([OLD, NEW, SIDE], SECOND)


def test_what_was_removed_goes_only_once_something_newer_is_safe() -> None:
    gone = replace(OLD, gone=Gone.HERE)
    assert unneeded([gone, NEW, SIDE], BOTH, SENT) == [gone]
    assert unneeded([gone, replace(NEW, proved=None), SIDE], BOTH, SENT) == []
    assert unneeded([OLD, NEW, SIDE], BOTH, SENT) == []
    assert unneeded([gone], [FIRST], SENT) == []


def test_what_was_removed_stays_while_only_older_files_are_left() -> None:
    gone, third = replace(NEW, gone=Gone.HERE), replace(FIRST, number=3)
    assert unneeded([replace(OLD, last=3), gone], [FIRST, third], SENT) == []


@pytest.mark.parametrize(
    ("size", "brought", "does"),
    [
        (100, 100, True),  # the next one, about as large
        (50, 50, True),
        (1, 1, False),  # a file of metrics
        (40, 40, False),  # a model whose optimiser is still to come
        (40, 80, True),  # the second one since the stage keeps fewer
        (100, 10, True),  # one that replaced another, of many
    ],
)
def test_a_group_takes_the_place_of_one_that_is_not_much_larger(
    size: int, brought: int, does: bool
) -> None:
    before = Group(number=1, files=2, size=100, brought=500)
    assert succeeds(Group(number=2, files=1, size=size, brought=500 + brought), before) is does


def test_a_group_is_said_if_it_is_whole_and_no_smaller_part_of_the_one_that_is() -> None:
    files, unsaid = [OLD, NEW, SIDE], replace(SECOND, pack=0)
    assert may_be_said(files, [FIRST, unsaid], unsaid)
    assert not may_be_said(files[:2], [FIRST, unsaid], unsaid)
    large = replace(FIRST, size=100)
    assert not may_be_said(files, [large, unsaid], unsaid)
    assert may_be_said(files, [replace(large, pack=0), unsaid], unsaid)


def test_a_group_is_not_said_after_a_newer_one_but_again_if_it_was() -> None:
    files, first = [OLD, NEW, SIDE], replace(FIRST, pack=0)
    assert not may_be_said(files, [first, SECOND], first)
    assert may_be_said(files, [first, SECOND], replace(FIRST, pack=-1))


def test_a_group_that_replaces_files_under_their_names_is_said_once_it_is_proved() -> None:
    other = replace(NEW, path=OLD.path, sha256="2" * 64, pack=0)
    unsaid = replace(SECOND, files=1, pack=0)
    assert replaced([OLD, other], unsaid) == [OLD]
    assert may_be_said([OLD, other], [FIRST, unsaid], unsaid)
    unproved = replace(other, proved=None)
    assert not may_be_said([OLD, unproved], [FIRST, unsaid], unsaid)
    assert may_be_said([replace(OLD, pack=0), unproved], [FIRST, unsaid], unsaid)
