"""What a pipeline is made of: items, the source that numbers them, and the stages they pass.

An item's sequence number is its place in the whole run, so "how far is the run" is one number,
whatever was read ahead: the count of items that left the last stage.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from protocol.errors import UserError

T = TypeVar("T")
U = TypeVar("U")

SHOWN_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Item(Generic[T]):
    """One unit of work on its way through the stages, usually a batch.

    `seq` counts from 0 over the whole run without gaps, `epoch` from 0; `last` marks the item
    that ends its epoch; `nbytes` is what a channel counts; `sample_ids` are the clip ids in it.
    """

    seq: int
    epoch: int
    payload: T
    nbytes: int = 0
    sample_ids: Sequence[str] = ()
    last: bool = False

    def with_payload(self, payload: U, *, nbytes: int = 0) -> Item[U]:
        """Return the same item carrying `payload`."""
        return replace(self, payload=payload, nbytes=nbytes)  # type: ignore[arg-type, return-value]


class Source(Protocol[T]):
    """Where items come from, in order of their sequence numbers, the same ones each time."""

    @property
    def name(self) -> str: ...

    def __iter__(self) -> Iterator[Item[T]]:
        """Iterate from the position that `load_state_dict` set, or from the beginning."""
        ...

    def state_dict(self, consumed: int) -> Mapping[str, Any]:
        """Return the position after the items with `seq < consumed`, read ahead or not."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state_dict` returned. Raises DataError when it is not ours."""
        ...


class Stage(Protocol[T, U]):
    """One step of the work. A stage is driven by one thread at a time."""

    @property
    def name(self) -> str: ...

    def process(self, item: Item[T]) -> Item[U]:
        """Do this stage's work; the item returned keeps `seq`, `epoch` and `last`."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs of this stage: tensors, numbers, strings, in dicts."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Release what the stage holds; called once, also after a failure."""
        ...


class Stateless:
    """Base for stages that hold nothing over from one item to the next."""

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


class StageError(Exception):
    """A stage failed on an item; the cause is chained. Names stage, sequence number, samples."""

    def __init__(self, stage: str, item: Item[Any] | None) -> None:
        self.stage = stage
        self.seq = None if item is None else item.seq
        self.sample_ids = () if item is None else tuple(item.sample_ids)
        super().__init__(describe_failure(stage, item))


def describe_failure(stage: str, item: Item[Any] | None) -> str:
    """Return `stage 'step' failed on item 12 (epoch 3, 32 samples: GunPoint-train-0007, ...)`."""
    if item is None:
        return f"stage {stage!r} failed between items"
    shown = ", ".join(item.sample_ids[:SHOWN_SAMPLES])
    more = ", ..." if len(item.sample_ids) > SHOWN_SAMPLES else ""
    samples = f", {len(item.sample_ids)} samples: {shown}{more}" if item.sample_ids else ""
    return f"stage {stage!r} failed on item {item.seq} (epoch {item.epoch}{samples})"


@contextlib.contextmanager
def failures_named(stage: str, item: Item[Any] | None = None) -> Iterator[None]:
    """Raise what fails in the block as StageError, with two exceptions: a user's error, and what
    the system refused, stay what they are, with a note.
    """
    try:
        yield
    except (UserError, OSError) as error:
        error.add_note(describe_failure(stage, item))
        raise
    except Exception as error:
        raise StageError(stage, item) from error


class Activity(StrEnum):
    """What a stage does with its time."""

    BUSY = "busy"  # working on an item
    STARVED = "starved"  # waiting for its input
    BLOCKED = "blocked"  # waiting for room in its output


class StageClock:
    """Seconds that one stage spent busy, starved and blocked, and the items it processed."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Activity, 0.0)
        self.items = 0

    def add(self, activity: Activity, seconds: float) -> None:
        self.seconds[activity] += seconds

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Count the time of the block as `activity`, also when it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(activity, time.perf_counter() - begin)

    def report(self) -> dict[str, float]:
        """Return `{"items", "busy_s", "starved_s", "blocked_s"}`."""
        times = {f"{activity}_s": self.seconds[activity] for activity in Activity}
        return {"items": float(self.items), **times}
