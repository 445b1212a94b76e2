"""Which files of a run's checkpoint folder are safe together, and which are not needed any more.

A stage is any program, so nothing is read into the names of its files. What is brought away is the
folder as it was at a moment: a group, whose files may need each other. A file that is still there
when the next group is brought away is in that one too. A group counts only whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeVar

# What is less than this part of a group does not take its place.
SMALL_PART = 0.5


class Gone(IntEnum):
    """What became of a file in its folder: it is there; the stage has removed it; and so it may go
    from the remote as well."""

    NO = 0
    HERE = 1
    EVERYWHERE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A checkpoint file whose content is on the remote.

    It is in the groups `first` to `last`. `made_ns` is its modification time; `gone` what became of
    it in its folder; `told` whether its content was said, `pack` the pack that says the file, 0 for
    none; `until` what that says of `last`: 0 that the file is there, -1 that groups were not said
    yet; `proved` when its bytes on the remote were found to be right, and `how`.
    """

    path: str
    sha256: str
    size: int
    mode: int
    made_ns: int
    inode: int
    first: int
    last: int
    gone: Gone = Gone.NO
    told: bool = False
    pack: int = 0
    until: int = 0
    proved: float | None = None
    how: str = ""

    @property
    def name(self) -> str:
        """The path below the folder of its run's checkpoints."""
        return self.path.split("/", 3)[3]

    @property
    def made(self) -> float:
        """When it was made, in seconds since the epoch."""
        return self.made_ns / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A run's folder as it was at a moment.

    `files` is how many were brought away, of `size` bytes together; `missing` those that could not
    be, with the reason, by their paths below the folder; `brought` how many bytes were brought
    since the run began; `pack` the pack that says the group, 0 for none, -1 where it was said and
    is to be said again.
    """

    number: int
    files: int
    size: int = 0
    brought: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    pack: int = 0


class _InGroups(Protocol):
    """A file that is in the groups `first` to `last`."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...


_File = TypeVar("_File", bound=_InGroups)


def members(files: Iterable[_File], number: int) -> list[_File]:
    """Return the files of a group."""
    return [each for each in files if each.first <= number <= each.last]


def is_whole(files: Iterable[_InGroups], group: Group) -> bool:
    """Whether all files of a group are known."""
    return not group.missing and 0 < group.files == len(members(files, group.number))


def is_proved(files: Iterable[Kept], group: Group) -> bool:
    """Whether the bytes of a group's files are known to be right on the remote."""
    return all(each.proved is not None for each in members(files, group.number))


def safe_groups(files: Sequence[Kept], groups: Iterable[Group], sent: int) -> list[Group]:
    """Return the groups that a fresh worker can restore, packs up to `sent` being on the remote;
    the newest first."""
    known, proved = _counted(files), _counted([f for f in files if f.proved is not None])
    found = [
        each
        for each in groups
        if 0 < each.pack <= sent
        and not each.missing
        and 0 < each.files == known(each.number) == proved(each.number)
    ]
    return sorted(found, key=lambda each: each.number, reverse=True)


def _counted(files: Sequence[_InGroups]) -> Callable[[int], int]:
    """Return how many files a group has, by its number: there may be very many of both."""
    firsts, lasts = sorted(f.first for f in files), sorted(f.last for f in files)
    return lambda number: bisect_right(firsts, number) - bisect_left(lasts, number)


def newest_safe(files: Sequence[Kept], groups: Iterable[Group], sent: int) -> Kept | None:
    """Return the newest file of the newest group of a run that is safe."""
    safe = safe_groups(files, groups, sent)
    return max(members(files, safe[0].number), key=_age) if safe else None


def unneeded(files: Sequence[Kept], groups: Iterable[Group], sent: int) -> list[Kept]:
    """Return which files that the stage has removed may go from the remote as well.

    A newer file is safe then, with all that was there beside it after they were removed.
    """
    safe = safe_groups(files, groups, sent)
    if not safe:
        return []
    newest = max(members(files, safe[0].number), key=_age)
    return [
        each
        for each in files
        if each.gone and each.last < safe[0].number and each.made_ns < newest.made_ns
    ]


def succeeds(group: Group, before: Group) -> bool:
    """Whether a group is a checkpoint that can take the place of one before, and not a small file
    that is newer: it is of about its size, or as much has come since."""
    wanted = before.size * SMALL_PART
    return group.size >= wanted or group.brought - before.brought >= wanted


def replaced(files: Sequence[Kept], group: Group) -> list[Kept]:
    """Return the files that others of a group take the place of, under their names."""
    names = {each.path: each.sha256 for each in members(files, group.number)}
    return [
        each
        for each in files
        if each.last < group.number and names.get(each.path, each.sha256) != each.sha256
    ]


def may_be_said(files: Sequence[Kept], groups: Sequence[Group], group: Group) -> bool:
    """Whether a group can be named to others, who go on from it then, and not from one before.

    Where it takes away files that it replaces under their names, it must be proved first.
    """
    if group.pack > 0 or not is_whole(files, group):
        return False
    if group.pack == 0:
        said = [each for each in groups if each.pack and is_whole(files, each)]
        if any(each.number > group.number for each in said):
            return False
        if said and not succeeds(group, said[-1]):
            return False
    return is_proved(files, group) or not any(each.pack for each in replaced(files, group))


def _age(each: Kept) -> tuple[int, str]:
    return each.made_ns, each.path
