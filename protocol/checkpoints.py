"""`in/checkpoints.json`: which files of the durable store are really on the remote.

A checkpoint is any file below `store/checkpoints/<run id>/`; stages are any program, so names say
nothing. A file is safe once what holds its bytes on the remote was found whole there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CHECKPOINTS = "store/checkpoints/"
VERSION = 1
# Files made within so many seconds of each other are taken to belong together.
TOGETHER_SECONDS = 5.0


class Proof(StrEnum):
    """How the bytes of an object were found to be whole on the remote."""

    HASH = "hash"  # the remote's own hash of it agrees
    STORED = "stored"  # the controller has it on its own disk, and has hashed it there
    READ_BACK = "read_back"  # the worker has fetched and hashed it


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A file of a run's checkpoint folder, by its path below that folder.

    `made` is when it got the content that was hashed; `said` whether the remote has the message
    that names it, `proof` how all that holds its bytes was found whole, and `since` when.
    """

    name: str
    size: int
    sha256: str
    made: float
    said: bool = False
    proof: Proof | None = None
    since: float | None = None

    @property
    def safe(self) -> bool:
        """Whether a worker on an empty disk is able to restore it."""
        return self.said and self.proof is not None


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The whole file: each run's files, the oldest first."""

    version: int = VERSION
    runs: Mapping[str, tuple[CheckpointFile, ...]] = field(default_factory=dict)


def newest_safe(files: Iterable[CheckpointFile]) -> CheckpointFile | None:
    """Return the newest file that is safe with all that are older; None when there is none."""
    newest = None
    for file in sorted(files, key=lambda file: (file.made, file.name)):
        if not file.safe:
            break
        newest = file
    return newest


def is_superseded(made: float, left: Iterable[CheckpointFile]) -> bool:
    """Whether nobody needs what a run made then, and has taken away, for going on from.

    That is so once a newer file of what it has `left` is safe with all before it, and so are those
    that it made at the same time: weights and what stands beside them are one checkpoint.
    """
    files = sorted(left, key=lambda file: (file.made, file.name))
    for file, following in itertools.zip_longest(files, files[1:]):
        if not file.safe:
            return False
        alone = following is None or following.made - file.made > TOGETHER_SECONDS
        if file.made > made and alone:
            return True
    return False


def at_risk_since(safe: CheckpointFile | None, begun: float) -> float:
    """Return from when on the work of an attempt that began at `begun` would be lost with its
    machine: since its newest safe file, or all of it."""
    return max(safe.made, begun) if safe else begun
