"""WebDataset, on its own format: tar shards of one `.npy` a column.

- https://github.com/webdataset/webdataset/blob/main/README.md: shards are shuffled, then rows in a
  buffer of 1000, then decoded and batched in the pipeline itself
- https://github.com/webdataset/webdataset/blob/main/docs/FAQ.md: rows that differ in length need a
  collation of one's own; a generator of one's own goes in by `compose`; `WebLoader` has the workers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.bench.batches import Batch, Plan, as_they_come
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.corpus import prepared, views
from trainer.bench.peers.datasets import WORKERS
from trainer.bench.peers.torch_loader import closing_workers, tensors

ROWS_A_SHARD = 10_000
SHUFFLE_SHARDS = 100
SHUFFLE_ROWS = 1000


def _written(work: Work) -> list[str]:
    def build(folder: Path) -> None:
        import webdataset

        pattern = str(folder / "%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=ROWS_A_SHARD, verbose=0) as writer:
            for row, (ids, mask) in enumerate(views(work.corpus)):
                writer.write({"__key__": f"{row:09d}", "ids.npy": ids, "mask.npy": mask})

    folder = prepared(work.folder / f"webdataset-{work.corpus.folder.name}", build)
    return [str(path) for path in sorted(folder.glob("*.tar"))]


def _within_budget(rows: Iterable[Any]) -> Iterator[Batch]:
    yield from map(tensors, as_they_come(rows))


def _iterating(shards: list[str], workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        import webdataset

        rows = webdataset.WebDataset(
            shards, shardshuffle=SHUFFLE_SHARDS, seed=int(plan[0][0]), empty_check=False
        )
        rows = rows.shuffle(SHUFFLE_ROWS).decode().to_tuple("ids.npy", "mask.npy")
        batches = rows.compose(_within_budget)
        loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers)
        yield from closing_workers(loader)

    return start


def _contestants(work: Work) -> list[Contestant]:
    shards = _written(work)
    return [
        Contestant(
            name=f"WebDataset, {workers} workers",
            part=Part.PEER,
            start=_iterating(shards, workers),
            order=Order.OWN,
        )
        for workers in WORKERS
    ]


PEER = Peer(name="webdataset", needs=("webdataset",), contestants=_contestants)
