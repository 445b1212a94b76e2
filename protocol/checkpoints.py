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
    machines are told of it, `safe` since when a fresh machine can surely restore it (null: it is
    not known to), and `how` that was found out.
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
class CheckpointIndex:
    """The file as a whole: the files of each run, by its id, oldest first."""

    version: int = VERSION
    runs: Mapping[str, tuple[CheckpointFile, ...]] = field(default_factory=dict)
