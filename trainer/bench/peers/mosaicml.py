"""MosaicML Streaming, on its own format, MDS, without compression.

Its `StreamingDataset` iterates in an order of its own, shuffled; `LocalDataset` has random access
to the same files, and takes the plan.

- https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/quick_start.html: the batch
  size is told to the dataset as well as to the loader
- https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html: MDS
  is the fastest of the formats; an encoding per column
- https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/performance_tuning.html:
  the defaults are what to begin with
"""

from __future__ import annotations

from pathlib import Path

from trainer.bench.batches import Batch, Plan
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.corpus import prepared, views
from trainer.bench.peers.datasets import WORKERS, of_arrays
from trainer.bench.peers.torch_loader import budgeted, closing_workers

# About what a batch within the budget holds; the dataset shares rows among workers in such blocks.
ROWS_A_BATCH = 64


def _written(work: Work) -> Path:
    def build(folder: Path) -> None:
        from streaming import MDSWriter

        columns = {"ids": "ndarray:int32", "mask": "ndarray:int8"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for ids, mask in views(work.corpus):
                writer.write({"ids": ids, "mask": mask})

    return prepared(work.folder / f"mds-{work.corpus.folder.name}", build)


def _iterating(folder: Path, workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        rows = StreamingDataset(
            local=str(folder),
            shuffle=True,
            shuffle_seed=int(plan[0][0]),
            batch_size=ROWS_A_BATCH,
        )
        yield from budgeted(rows, lambda row: (row["ids"], row["mask"]), workers=workers)

    return start


def _indexed(folder: Path, workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        from streaming import LocalDataset
        from torch.utils.data import DataLoader

        lists = [rows.tolist() for rows in plan]
        loader: DataLoader[Batch] = DataLoader(
            LocalDataset(str(folder)),
            batch_sampler=lists,
            collate_fn=of_arrays,
            num_workers=workers,
        )
        yield from closing_workers(loader)

    return start


def _contestants(work: Work) -> list[Contestant]:
    folder = _written(work)
    found = [
        Contestant(
            name=f"MosaicML StreamingDataset, {workers} workers",
            part=Part.PEER,
            start=_iterating(folder, workers),
            order=Order.OWN,
        )
        for workers in WORKERS
    ]
    found += [
        Contestant(
            name=f"MosaicML LocalDataset, {workers} workers",
            part=Part.PEER,
            start=_indexed(folder, workers),
        )
        for workers in WORKERS
    ]
    return found


PEER = Peer(name="mosaicml", needs=("streaming",), contestants=_contestants)
