"""Grain, on `datasets` in the format that is fastest there.

- https://google-grain.readthedocs.io/en/latest/tutorials/data_sources/huggingface_dataset_tutorial.html:
  a dataset of Hugging Face is a source as it is, because it has random access
- `grain.ReadOptions`, its docstring: 16 threads by default, none for data that is in memory already
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.bench.batches import Batch, Plan, Rows
from trainer.bench.contestant import Batches, Contestant, Part, Peer, Start, Work
from trainer.bench.peers.datasets import by_arrow

THREADS = (0, 16)
BUFFER = 16  # elements, here batches: the default of 500 would hold 160 MB


def mapped(fetch: Callable[[Rows], Batch], threads: int) -> Start:
    """Return what runs `fetch` for each batch of a plan, read by so many threads of Grain's."""

    def start(plan: Plan) -> Batches:
        import grain.python as grain

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=BUFFER)
        batches = iter(grain.MapDataset.source(plan).map(fetch).to_iter_dataset(options))
        try:
            yield from batches
        finally:
            batches.close()

    return start


def _contestants(work: Work) -> list[Contestant]:
    fetch = by_arrow(work)
    return [
        Contestant(
            name=f"grain on datasets, arrow format, {threads} threads",
            part=Part.PEER,
            start=mapped(fetch, threads),
        )
        for threads in THREADS
    ]


PEER = Peer(name="grain", needs=("grain", "datasets"), contestants=_contestants)
