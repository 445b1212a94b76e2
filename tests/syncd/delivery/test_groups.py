"""Which checkpoint files are safe together, and which may go."""

from __future__ import annotations

from dataclasses import replace

from syncd.delivery.groups import Gone, Kept, is_proved, newest_safe, unneeded

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


def test_a_file_is_safe_once_it_is_proved_and_said_on_the_remote() -> None:
    assert OLD.is_safe(SENT)
    assert not replace(OLD, proved=None).is_safe(SENT)
    assert not replace(OLD, pack=0).is_safe(SENT)
    assert not replace(OLD, pack=SENT + 1).is_safe(SENT)


def test_a_group_is_safe_as_a_whole_or_not() -> None:
    assert newest_safe([OLD, NEW, SIDE], SENT) == SIDE
    assert newest_safe([OLD, replace(NEW, proved=None), SIDE], SENT) == OLD
    assert newest_safe([replace(OLD, pack=0)], SENT) is None
    assert newest_safe([], SENT) is None


def test_a_file_that_is_in_two_groups_counts_in_both() -> None:
    kept = replace(OLD, last=2, proved=None)
    assert newest_safe([kept, NEW, SIDE], SENT) is None
    assert not is_proved([kept, NEW, SIDE], 2)
    assert is_proved([OLD, NEW, SIDE], 2)


def test_what_was_removed_goes_only_once_something_newer_is_safe() -> None:
    gone = replace(OLD, gone=Gone.HERE)
    assert unneeded([gone, NEW, SIDE], SENT) == [gone]
    assert unneeded([gone, replace(NEW, proved=None), SIDE], SENT) == []
    assert unneeded([OLD, NEW, SIDE], SENT) == []
    assert unneeded([gone], SENT) == []


def test_what_was_removed_stays_while_only_older_files_are_left() -> None:
    gone = replace(NEW, gone=Gone.HERE)
    assert unneeded([replace(OLD, last=3), gone], SENT) == []
