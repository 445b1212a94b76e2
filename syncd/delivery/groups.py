"""Which files of a run's checkpoint folder are safe together, and which are not needed any more.

A stage is any program, so nothing is read into the names of its files. What is brought away is the
folder as it was at a moment: a group, whose files may need each other. A file that is still there
when the next group is brought away is in that one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


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
    none; `proved` when its bytes on the remote were found to be right, and `how`.
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

    def is_safe(self, sent: int) -> bool:
        """Whether a fresh worker can restore it, packs up to `sent` being on the remote."""
        return self.proved is not None and 0 < self.pack <= sent


def members(files: Iterable[Kept], group: int) -> list[Kept]:
    """Return the files of a group."""
    return [each for each in files if each.first <= group <= each.last]


def is_proved(files: Iterable[Kept], group: int) -> bool:
    """Whether the bytes of a whole group are known to be right on the remote."""
    return all(each.proved is not None for each in members(files, group))


def newest_safe(files: Sequence[Kept], sent: int) -> Kept | None:
    """Return the newest file of the newest group of a run that is safe as a whole."""
    for group in sorted({each.last for each in files}, reverse=True):
        found = members(files, group)
        if all(each.is_safe(sent) for each in found):
            return max(found, key=lambda each: (each.made_ns, each.path))
    return None


def unneeded(files: Sequence[Kept], sent: int) -> list[Kept]:
    """Return which files that the stage has removed may go from the remote as well.

    A newer file is safe then, with all that was there beside it after they were removed.
    """
    safe = newest_safe(files, sent)
    if safe is None:
        return []
    return [e for e in files if e.gone and e.last < safe.last and e.made_ns < safe.made_ns]
