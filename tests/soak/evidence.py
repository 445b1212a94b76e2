"""What is left of an episode, for `invariants` to judge: plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.journal import JournalRecord
from protocol.results import RunRecord


@dataclass(frozen=True)
class Appended:
    """A line that a person appended, and the payload's version at that moment."""

    line: str
    version: int


@dataclass(frozen=True)
class Statement:
    """What a stage's program told the witnesses."""

    event: str
    machine: str
    run: str
    attempt: int
    details: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EndSeen:
    """What one end shows; artefacts as paths below `in/artifacts`."""

    journal: Sequence[JournalRecord] = ()
    results: Mapping[str, RunRecord] = field(default_factory=dict)
    logs: Mapping[str, bytes] = field(default_factory=dict)
    artifacts: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that an episode is judged by.

    `hits` counts, for each run, the kills that its supervisor or stage may have died of; `arrived`
    the newest checkpoint that was on the remote before a machine began; `retries` by stage.
    """

    appended: Sequence[Appended] = ()
    testimony: Sequence[Statement] = ()
    laptop: EndSeen = EndSeen()
    vm: EndSeen = EndSeen()
    machines: int = 1
    hits: Mapping[str, int] = field(default_factory=Counter)
    arrived: Mapping[tuple[str, str], int] = field(default_factory=dict)
    retries: Mapping[str, int] = field(default_factory=dict)
    said: Sequence[str] = ()
    bad_looks: Sequence[str] = ()
    alive: Sequence[str] = ()
    leftovers: Sequence[str] = ()
    objects: int = 0
