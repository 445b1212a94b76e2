"""What takes part in the race: a name, where it stands in the table, and how it is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainer.bench.batches import Batch, Plan
from trainer.bench.corpus import Corpus

Batches = Generator[Batch]
Start = Callable[[Plan], Batches]


class Part(Enum):
    """The part of the table in which a contestant stands."""

    FLOOR = "floor"  # what bounds all of them, and yields nothing to train on
    OURS = "ours"
    PEER = "peer"  # as its manual configures it, on `datasets` or its own format
    FED = "fed with our rows"


class Order(Enum):
    """Which rows come, and when."""

    PLAN = "the plan's batches, in the plan's order"
    ANY = "the plan's batches, in any order"
    OWN = "the contestant's own order; batches are cut from it as it comes"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contestant works on: the corpus, and a folder for it in other formats."""

    corpus: Corpus
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to load: a generator of the plan's batches, which lets go of all when closed."""

    name: str
    part: Part
    start: Start
    order: Order = Order.PLAN

    @property
    def title(self) -> str:
        """The name as figures have it: that batches are the contestant's own is said there."""
        own = ", in its own order" if self.order is Order.OWN else ""
        return f"{self.part.value}: {self.name}{own}"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library to compare with: what it is called, what it needs, what it takes part with."""

    name: str
    needs: tuple[str, ...]
    contestants: Callable[[Work], list[Contestant]]

    def missing(self) -> str:
        """Return the first module that is not installed, "" when there is none."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), "")
