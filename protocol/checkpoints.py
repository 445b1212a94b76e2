"""`in/checkpoints.json`: which checkpoints there are, and which of them outlive the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A file of a run's checkpoint folder, `path` below that folder, as it was brought away.

    `made` is its modification time. `group` counts the run's groups: files that were in the folder
    together, and are of use together; the last one that the file was in. `said` is whether other
    machines are told of it, `safe` since when it is proved, if a fresh machine can surely restore a
    group with it (else null), and `how` that was found out.
    """

    path: str
    size: int
    sha256: str
    made: float
    group: int
    said: bool = False
    safe: float | None = None
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointGroup:
    """A run's folder as it was at a moment: how many `files` were brought away, and which are
    `missing`, by their paths below the folder, with the reason. One that lacks any is incomplete:
    it is never `safe`, and no machine restores it."""

    number: int
    files: int
    missing: Mapping[str, str] = field(default_factory=dict)
    safe: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The file as a whole: the files of each run, by its id, oldest first, and its groups."""

    version: int = VERSION
    runs: Mapping[str, tuple[CheckpointFile, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[CheckpointGroup, ...]] = field(default_factory=dict)
