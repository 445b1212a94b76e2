"""The loader: batches of an epoch, made ahead by threads, the same ones however many there are.

    rows = open_rows(Path("tokens"))
    loader = Loader(rows, Padded(budget=65_536), seed=7, pin_memory=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            batch = batch.to("cuda")

Terms and methods are those of torch's own loader that has a state (torchdata's
`StatefulDataLoader`). A thread makes a whole batch at a time: first which rows (`plan.py`, known
beforehand), then one copy of each row from the mapped file to where the batch lies.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from protocol.errors import DataError, UsageError
from trainer.loader.ahead import Ahead
from trainer.loader.batch import Batch
from trainer.loader.batching import Batching, Layout
from trainer.loader.columns import Column
from trainer.loader.kernels import Kernel, Kernels, Move, choose
from trainer.loader.metrics import LoaderMetrics
from trainer.loader.plan import Plan, Rows, deal
from trainer.loader.rows import Rows as Source
from trainer.loader.sampler import Sampler, Shuffled
from trainer.loader.warming import Warming

PREFETCH_BYTES = 64 * 1024 * 1024
VERSION = 1
_NONE = torch.empty(0, dtype=torch.int32)
_WHAT = "make a loader"
_LOOKED_UP = ("_columns", "_lengths", "_warming")


class Loader:
    """Yields the batches of one epoch each time it is iterated, this rank's part of them.

    After an epoch that was iterated to its end the next one follows, unless `set_epoch` says which.
    One iteration is under way at a time: a new one ends the one before, and begins the epoch anew
    but after `load_state_dict`. Ranks must be given the same
    rows, sampler, batching and seed; then they have equal numbers of steps, and no row in common.
    """

    def __init__(
        self,
        source: Source,
        batching: Batching,
        *,
        seed: int = 0,
        sampler: Sampler | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        threads: int = 2,
        prefetch_bytes: int = PREFETCH_BYTES,
        pin_memory: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
        preload: bool = True,
        transform: Callable[[Batch], Any] | None = None,
        kernel: Kernel = Kernel.AUTO,
    ) -> None:
        """`seed` shuffles the batches, and the rows if no `sampler` is given. `rank` and
        `world_size` are those of torch.distributed, or of the environment, by default. `threads` =
        0 makes each batch when it is asked for. `dtypes` are those that columns are converted to.
        `preload` has files that fit into memory read in order, beside the first epoch, and the rows
        of others before they are used.
        `transform` is called with each batch, in the threads; what it returns is yielded.

        Raises UsageError for what cannot be.
        """
        self.source = source
        self.batching = batching
        self.sampler = sampler or Shuffled(len(source), seed=seed)
        self.seed = seed
        self.rank, self.world_size = _place(rank, world_size)
        self.drop_last = drop_last
        self.left_out: Counter[str] = Counter()
        self.metrics = LoaderMetrics()
        self._threads = _at_least("threads", threads, 0)
        self._prefetch_bytes = _at_least("prefetch_bytes", prefetch_bytes, 1)
        self._pin = pin_memory
        self._preload = preload
        self._transform = transform
        self._kernels: Kernels = choose(Kernel(kernel))
        self._look_up()
        self._dtypes = _dtypes(self._columns, dtypes or {})
        self._epoch, self._base, self._step = 0, 0, 0
        self._resumed = False
        self._planned: tuple[int, Plan] | None = None
        self._ahead: Ahead[Any] | None = None

    def _look_up(self) -> None:
        """Find where the values are; elsewhere in another process."""
        self._warming = Warming(self.source)
        self._columns = _usable(self.source, ragged=self.batching.ragged)
        first = next(iter(self._columns.values()))
        self._lengths = self.source.lengths if self.batching.ragged else first.lengths

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__ | {"_ahead": None}
        return {name: value for name, value in kept.items() if name not in _LOOKED_UP}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_up()

    # Where it is

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that is next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration begin this epoch, from its start unless it is under way."""
        if _at_least("epoch", epoch, 0) != self._epoch:
            self.close()
            self._epoch, self._base, self._step, self._resumed = epoch, 0, 0, False

    def __len__(self) -> int:
        """Return how many batches this rank has in the epoch that is under way, or next."""
        return self._steps(self._dealt())

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were yielded, read ahead or not; the same on
        every rank."""
        return {
            "version": VERSION,
            "epoch": self._epoch,
            "base": self._base,
            "step": self._step,
            "world_size": self.world_size,
            **self._made_of(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position. With as many ranks the batches are those that would have come; with
        more or fewer the rows come in the same order, in other batches where these go over ranks.

        Raises DataError when it is a position in other data, or in another order of them.
        """
        if state.get("version") != VERSION:
            why = f"its version is {state.get('version')!r}; this program reads {VERSION}"
            raise DataError("resume the loader", why=why)
        here = self._made_of()
        if differing := sorted(name for name in here if state.get(name) != here[name]):
            raise DataError(
                "resume the loader",
                why=f"the state was made with another {', '.join(differing)}",
                hint="Load it with the data and the settings of then, or begin anew.",
            )
        self.close()
        self._epoch, self._base = int(state["epoch"]), int(state["base"])
        self._step = int(state["step"])
        if state["world_size"] != self.world_size:
            then = self._dealt(world_size=int(state["world_size"]))
            self._base, self._step = int(then[self._step * int(state["world_size"])]), 0
        self._resumed = True

    def _made_of(self) -> dict[str, Any]:
        return {
            "source": self.source.fingerprint,
            "columns": sorted(self._columns),
            "order": dict(self.sampler.state()),
            "batches": dict(self.batching.state()) | {"seed": self.seed},
            "drop_last": self.drop_last,
        }

    # Batches

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if not self._resumed:
            self._base, self._step = 0, 0
        self._resumed = False
        bounds, step = self._dealt(), self._step
        if self._preload:
            self._warming.start()
        ahead = self._ahead = Ahead(
            lambda step: self._made(bounds, step),
            range(step, self._steps(bounds)),
            threads=self._threads,
            max_bytes=self._prefetch_bytes,
            metrics=self.metrics,
            told=lambda step: self._told(bounds, step),
        )
        try:
            with ahead:
                for item in ahead:
                    self._step += 1
                    yield item
            # Not reached when the caller goes away before the end, or something failed.
            self._epoch, self._base, self._step = self._epoch + 1, 0, 0
        finally:
            if self._ahead is ahead:
                self.close()

    def close(self) -> None:
        """End an iteration that is under way, and its threads."""
        self._warming.stop()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _plan(self) -> Plan:
        if self._planned is None or self._planned[0] != self._epoch:
            rows = self.sampler.rows(self._epoch)
            plan, self.left_out = self.batching.plan(self.source, rows, self.seed, self._epoch)
            self._planned = (self._epoch, plan)
        return self._planned[1]

    def _dealt(self, world_size: int | None = None) -> Rows:
        return deal(
            self._plan().bounds,
            world_size or self.world_size,
            offset=self._base,
            drop_last=self.drop_last,
        )

    def _steps(self, bounds: Rows) -> int:
        return (len(bounds) - 1) // self.world_size

    def _rows(self, bounds: Rows, step: int) -> Rows:
        part = step * self.world_size + self.rank
        return self._plan().rows[bounds[part] : bounds[part + 1]]

    def _told(self, bounds: Rows, step: int) -> tuple[int, list[str]]:
        """Return what to say of a batch that failed: its epoch, and where its rows are."""
        return self._epoch, [self.source.where(int(row)) for row in self._rows(bounds, step)[:8]]

    def _made(self, bounds: Rows, step: int) -> tuple[Any, int]:
        if self._preload:
            self._warming.expect(self._rows(bounds, min(step + 1, self._steps(bounds) - 1)))
        rows = self._rows(bounds, step)
        layout = self.batching.layout(self._lengths[rows])
        batch = self._batch(rows, layout, step)
        nbytes = batch.nbytes
        self.metrics.count(batch, math.prod(layout.shape), nbytes)
        return (self._transform(batch) if self._transform else batch), nbytes

    def _batch(self, rows: Rows, layout: Layout, step: int) -> Batch:
        tensors, ragged, dense = {}, [], []
        for name, column in self._columns.items():
            shape = layout.shape if column.shape is None else (len(rows), *column.shape)
            # No ring of our own: torch keeps pinned blocks that were freed, and gives one out again
            # only when what was copied from it has arrived; malloc does as well without pinning.
            tensor = torch.empty(shape, dtype=self._dtypes[name], pin_memory=self._pin)
            tensors[name], starts, out = tensor, column.starts[rows], tensor.numpy()
            if column.shape is None:
                ragged.append(Move(starts, layout.counts, column.dtype, out))
            else:
                counts = column.lengths[rows].astype(np.int64)
                dense.append(Move(starts, counts, column.dtype, out.reshape(len(rows), -1)))
        tokens = int(layout.counts.sum())
        if self.batching.packed:
            self._kernels.pack([replace(move, out=move.out[:tokens]) for move in ragged])
            for move in ragged:
                move.out[tokens:] = 0
        self._kernels.pad(dense if self.batching.packed else [*ragged, *dense])
        return Batch(
            tensors=tensors,
            lengths=torch.from_numpy(layout.counts.astype(np.int32)),
            boundaries=_boundaries(layout.counts) if self.batching.packed else _NONE,
            rows=rows,
            epoch=self._epoch,
            step=step,
            longest=int(layout.counts.max()),
            tokens=tokens,
        )


def _boundaries(counts: Rows) -> torch.Tensor:
    bounds = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=bounds[1:])
    return torch.from_numpy(bounds)


def _usable(source: Source, *, ragged: bool) -> dict[str, Column]:
    """Return the columns that go into batches. Raises UsageError when they cannot."""
    columns = dict(source.columns)
    varying = [name for name, column in columns.items() if column.shape is None]
    if ragged and not varying:
        why, hint = "no column has rows that differ in length", "Make batches with Fixed(size=...)."
    elif varying and not ragged:
        why = f"rows differ in length in the column {varying[0]!r}"
        hint = "Use Padded or Packed, or open the rows with other columns."
    elif not columns or not len(source):
        why, hint = "there are no rows", ""
    else:
        return columns
    raise UsageError(_WHAT, why=why, hint=hint)


def _dtypes(
    columns: Mapping[str, Column], wanted: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    if unknown := sorted(wanted.keys() - columns.keys()):
        why = f"dtypes names the column {unknown[0]!r}; there are {', '.join(columns)}"
        raise UsageError(_WHAT, why=why)
    own = {name: torch.from_numpy(np.empty(0, c.dtype)).dtype for name, c in columns.items()}
    return {**own, **wanted}


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else torch.distributed's, else the environment's."""
    if (rank is None) != (world_size is None):
        raise UsageError(_WHAT, why="rank and world_size go together")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = (
                int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1))
            )
    if not 0 <= rank < world_size:
        why = f"rank is {rank} and world_size is {world_size}: a rank is from 0 to below that"
        raise UsageError(_WHAT, why=why)
    return rank, world_size


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(_WHAT, why=f"{name} is {value}; it must be at least {least}")
    return value
