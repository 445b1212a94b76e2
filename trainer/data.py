"""Which clips a stage sees, and in which order.

Both are functions of the seed and the clips' ids: nothing is kept from one epoch to the next, so
a position in the run is a single number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import DataError, UsageError
from trainer.engine.stage import Item
from trainer.pool.format import Clips, Pool, Rows
from trainer.pool.sample import IndexFile, read_index
from trainer.randomness import Words, order, stream, uniform


class Part(StrEnum):
    """What a clip is for: to learn from, to choose by, or for the gate alone."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def split_indices(
    pool: Pool,
    part: Part,
    *,
    index: IndexFile | None = None,
    validation_share: float = 0.2,
    seed: int = 0,
) -> Rows:
    """Return the rows of one part, (n,), ascending.

    The corpora's own test clips are TEST: the gate's alone, and all of them, whatever the index.
    Of the others, those in `index` if there is one, about `validation_share` are VALIDATION,
    chosen by a keyed hash of the clip's id, so that a clip's part does not depend on the index.

    Raises UsageError when the part is empty.
    """
    held_out = pool.split.is_(Part.TEST)
    if part is Part.TEST:
        chosen = held_out
    else:
        draw = uniform(stream(seed, "validation"), pool.keys, 1)[:, 0]
        validation = draw < validation_share
        chosen = ~held_out & (validation if part is Part.VALIDATION else ~validation)
        if index is not None:
            chosen &= np.isin(np.arange(pool.rows), index.rows)
    rows = np.flatnonzero(chosen).astype(np.int64)
    if not rows.size:
        raise UsageError(
            f"choose the {part} clips",
            path=pool.folder,
            why="there are none",
            hint="Draw a larger sample, or another validation share.",
        )
    return rows


def learning_parts(pool: Pool, *, index: Path | None, validation_share: float) -> dict[Part, Rows]:
    """Return the rows to learn from and those to choose by, of the sample in the file `index`.

    Raises what `read_index` and `split_indices` raise.
    """
    sampled = None if index is None else read_index(index, pool)
    return {
        part: split_indices(pool, part, index=sampled, validation_share=validation_share)
        for part in (Part.TRAIN, Part.VALIDATION)
    }


@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """Clips (n, T) float32, their rows in the pool (n,), and their random keys (n,)."""

    clips: Clips
    rows: Rows
    keys: Words


class ClipSource:
    """The source of a pipeline: batches of clips, epoch by epoch.

    Each epoch visits every row once, in an order that (seed, epoch) decides; its last batch may
    be smaller. `state_dict` and `load_state_dict` work in the middle of an epoch as well.
    """

    name = "source"

    def __init__(self, pool: Pool, rows: Rows, *, batch_size: int, epochs: int, seed: int) -> None:
        for field, value in (("batch_size", batch_size), ("epochs", epochs), ("rows", len(rows))):
            if value < 1:
                raise UsageError("load clips", why=f"{field} is {value}; it must be at least 1")
        self.pool = pool
        self.rows = rows
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self._start = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    @property
    def steps(self) -> int:
        """The number of items of the whole run."""
        return self.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[Item[ClipBatch]]:
        keys = self.pool.keys[self.rows]
        ordered = self.rows
        for seq in range(self._start, self.steps):
            epoch, step = divmod(seq, self.steps_per_epoch)
            if step == 0 or seq == self._start:
                ordered = self.rows[order(stream(self.seed, "order", epoch), keys)]
            rows = ordered[step * self.batch_size : (step + 1) * self.batch_size]
            yield self._item(seq, epoch, rows, last=step == self.steps_per_epoch - 1)

    def _item(self, seq: int, epoch: int, rows: Rows, *, last: bool) -> Item[ClipBatch]:
        batch = ClipBatch(clips=self.pool.clips(rows), rows=rows, keys=self.pool.keys[rows])
        return Item(
            seq=seq,
            epoch=epoch,
            payload=batch,
            nbytes=batch.clips.nbytes,
            sample_ids=self.pool.clip_id[rows].tolist(),
            last=last,
        )

    def state_dict(self, consumed: int) -> Mapping[str, Any]:
        """Return the position after `consumed` items, and what it is a position in."""
        return {
            "consumed": consumed,
            "pool": self.pool.content_hash,
            "rows": hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest(),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position. Raises DataError when it is one in other data."""
        here = self.state_dict(int(state["consumed"]))
        differing = sorted(name for name, value in here.items() if state.get(name) != value)
        if differing:
            raise DataError(
                "resume the source",
                path=self.pool.folder,
                why=f"the checkpoint was made with another {', '.join(differing)}",
                hint="Start a new run.",
            )
        self._start = int(state["consumed"])
