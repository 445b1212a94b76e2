"""LitData, on its own format: chunks of 64 MB, which are mapped in place when they are local.

- https://github.com/Lightning-AI/litData/blob/main/README.md: `optimize` with `chunk_bytes="64MB"`
  of samples whose leaves are NumPy's; `StreamingDataset(shuffle=True)`, chunks and then rows within
  them; `batch_decode` as it chooses itself
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.bench.batches import Plan
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.corpus import Corpus, prepared, views
from trainer.bench.peers.datasets import WORKERS
from trainer.bench.peers.torch_loader import budgeted


def _rows(corpus: Corpus) -> Iterator[dict[str, NDArray[np.int32] | NDArray[np.int8]]]:
    for ids, mask in views(corpus):
        yield {"ids": ids, "mask": mask}


def _written(work: Work) -> Path:
    def build(folder: Path) -> None:
        import litdata

        litdata.optimize(
            fn=_rows,
            inputs=[work.corpus],
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
            verbose=False,
            start_method="fork",
        )

    return prepared(work.folder / f"litdata-{work.corpus.folder.name}", build)


def _iterating(folder: Path, workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        from litdata import StreamingDataset

        rows = StreamingDataset(str(folder), shuffle=True, seed=int(plan[0][0]))
        yield from budgeted(rows, lambda row: (row["ids"], row["mask"]), workers=workers)

    return start


def _contestants(work: Work) -> list[Contestant]:
    folder = _written(work)
    return [
        Contestant(
            name=f"LitData StreamingDataset, {workers} workers",
            part=Part.PEER,
            start=_iterating(folder, workers),
            order=Order.OWN,
        )
        for workers in WORKERS
    ]


PEER = Peer(name="litdata", needs=("litdata",), contestants=_contestants)
