"""The other loaders, fed with our zero-copy rows: what the loader itself costs them.

Each as in its own module; only where the rows come from, and that they are padded from views by
the same copies of slices, is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer.bench.batches import Batch, Plan, Row, Rows, pad
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.ours import ZeroCopy
from trainer.bench.peers import grain, spdl
from trainer.bench.peers.datasets import WORKERS
from trainer.bench.peers.torch_loader import closing_workers, tensors


def _padded(rows: Sequence[Row]) -> Batch:
    return tensors(pad(rows))


def _torch(source: ZeroCopy, workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(
            source,
            batch_sampler=[rows.tolist() for rows in plan],
            collate_fn=_padded,
            num_workers=workers,
        )
        yield from closing_workers(loader)

    return start


def _data_loader(work: Work) -> list[Contestant]:
    source = ZeroCopy(work.corpus)
    return [
        Contestant(
            name=f"DataLoader, {workers} workers", part=Part.FED, start=_torch(source, workers)
        )
        for workers in WORKERS
    ]


def _fetch(source: ZeroCopy) -> Callable[[Rows], Batch]:
    return lambda rows: pad([source[row] for row in rows])


def _spdl(work: Work) -> list[Contestant]:
    start = spdl.threaded(_fetch(ZeroCopy(work.corpus)))
    name = f"SPDL, {spdl.CONCURRENCY} threads"
    return [Contestant(name=name, part=Part.FED, start=start, order=Order.ANY)]


def _grain(work: Work) -> list[Contestant]:
    fetch = _fetch(ZeroCopy(work.corpus))
    return [
        Contestant(
            name=f"grain, {threads} threads", part=Part.FED, start=grain.mapped(fetch, threads)
        )
        for threads in grain.THREADS
    ]


PEERS = (
    Peer(name="fed-torch", needs=(), contestants=_data_loader),
    Peer(name="fed-spdl", needs=("spdl",), contestants=_spdl),
    Peer(name="fed-grain", needs=("grain",), contestants=_grain),
)
