"""What is ours in the race, and the floor under everybody: a plain copy out of the mapped file.

`contestants` is the one place where our loader takes part: the kernels by themselves, and the
whole loader, each with numba and with NumPy alone.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainer.bench import batches as bench
from trainer.bench.contestant import Batches, Contestant, Part, Start, Work
from trainer.bench.corpus import BYTES_A_TOKEN, Corpus
from trainer.bench.interleaved import mapped, pieces
from trainer.loader import Kernel, Loader, Padded, Shuffled, open_rows
from trainer.loader.batching import Layout
from trainer.loader.kernels import Move, choose
from trainer.loader.plan import Lengths, Plan, Rows
from trainer.loader.rows import Rows as Source

COLUMNS = ("ids", "mask")


def plan_batches(source: Source, *, seed: int = 0) -> bench.Plan:
    """Return every row once, in the batches that our loader makes of them: what all are given."""
    rows = Shuffled(len(source), seed=seed).rows(0)
    plan, _ = Padded(budget=bench.BUDGET).plan(source, rows, seed, 0)
    return np.split(plan.rows, plan.bounds[1:-1])


def preloaded(corpus: Corpus) -> Source:
    """Return the corpus' rows, every page of them in memory and mapped."""
    source = open_rows(corpus.shards, columns=COLUMNS)
    source.preload()
    return source


class ZeroCopy(Dataset[bench.Row]):
    """Each row's `ids` and `mask` as views of the mapped files: a map-style dataset for anybody."""

    def __init__(self, corpus: Corpus) -> None:
        self._source = preloaded(corpus)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> bench.Row:
        ids, mask = (self._source.columns[name].view(row) for name in COLUMNS)
        return ids, mask  # type: ignore[return-value]  # the corpus' own types


@dataclass(frozen=True, kw_only=True)
class Given:
    """Batches that were decided elsewhere, for our loader: the plan that everybody is given."""

    batches: bench.Plan
    ragged: bool = field(default=True, init=False)
    packed: bool = field(default=False, init=False)

    def plan(self, source: Source, rows: Rows, seed: int, epoch: int) -> tuple[Plan, Counter[str]]:
        bounds = np.cumsum([0, *map(len, self.batches)])
        return Plan(np.concatenate(self.batches), bounds), Counter()

    def layout(self, lengths: Lengths) -> Layout:
        return Padded(budget=bench.BUDGET).layout(lengths)

    def state(self) -> Mapping[str, Any]:
        return {"batching": "given"}


def memcpy(corpus: Corpus) -> Contestant:
    """Return the floor: as many bytes as a batch has, in one piece, from the map to one buffer."""
    maps = mapped(corpus.shards)

    def start(plan: bench.Plan) -> Batches:
        sizes = [int(corpus.lengths[rows].sum()) * BYTES_A_TOKEN for rows in plan]
        buffer = np.zeros(max(sizes), dtype=np.uint8)
        nothing = bench.Batch(None, None)
        for piece in pieces(maps, sizes, np.random.default_rng(int(plan[0][0]))):
            np.copyto(buffer[: len(piece)], piece)
            yield nothing

    return Contestant(name="memcpy", part=Part.FLOOR, start=start)


def kernel_alone(source: Source, kernel: Kernel) -> Start:
    """Return what copies each batch into one buffer a column, and does nothing else."""
    pad = choose(kernel).pad
    columns = [source.columns[name] for name in COLUMNS]

    def start(plan: bench.Plan) -> Batches:
        buffers = [np.empty(bench.BUDGET, column.dtype) for column in columns]
        for rows in plan:
            counts = source.lengths[rows].astype(np.int64)
            shape = len(rows), int(counts.max())
            padded = [buffer[: math.prod(shape)].reshape(shape) for buffer in buffers]
            pad(
                [
                    Move(column.starts[rows], counts, column.dtype, out)
                    for column, out in zip(columns, padded, strict=True)
                ]
            )
            yield bench.Batch(*padded)

    return start


def whole_loader(source: Source, kernel: Kernel) -> Start:
    """Return our loader as it is by default, on the batches of the plan; they are in memory."""

    def start(plan: bench.Plan) -> Batches:
        loader = Loader(source, Given(batches=plan), kernel=kernel, preload=False)
        try:
            for batch in loader:
                yield bench.Batch(batch["ids"], batch["mask"])
        finally:
            loader.close()

    return start


def kernels() -> list[Kernel]:
    """Return the kernels that can be used here."""
    numba = importlib.util.find_spec("numba") is not None
    return [*([Kernel.NUMBA] if numba else []), Kernel.NUMPY]


def contestants(work: Work) -> list[Contestant]:
    """Return the floor, and what is ours."""
    source = preloaded(work.corpus)
    found = [memcpy(work.corpus)]
    for kernel in kernels():
        for name, start in (("kernel", kernel_alone), ("loader", whole_loader)):
            title = f"{name}, {kernel}"
            found.append(Contestant(name=title, part=Part.OURS, start=start(source, kernel)))
    return found
