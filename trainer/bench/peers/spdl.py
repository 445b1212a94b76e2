"""SPDL, on `datasets` in the format that is fastest there.

Threads, because the work, Arrow's and NumPy's copies, releases the GIL; its worker processes took
more than twice as long here.

- https://facebookresearch.github.io/spdl/latest/getting_started/execution_models.html: when
  threads are best, and when processes
- https://facebookresearch.github.io/spdl/latest/getting_started/intro.html: a source that is
  cheap to iterate, stages with a concurrency, a sink with a small buffer, `auto_stop`
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.bench.batches import Batch, Plan, Rows
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.peers.datasets import by_arrow

CONCURRENCY = 2
SINK = 3


def threaded(fetch: Callable[[Rows], Batch]) -> Start:
    """Return what runs `fetch` on SPDL's threads for each batch of a plan."""

    def start(plan: Plan) -> Batches:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(plan).pipe(fetch, concurrency=CONCURRENCY)
        pipeline = builder.add_sink(SINK).build(num_threads=CONCURRENCY)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return start


def _contestants(work: Work) -> list[Contestant]:
    fetch = by_arrow(work)
    return [
        Contestant(
            name=f"SPDL on datasets, arrow format, {CONCURRENCY} threads",
            part=Part.PEER,
            start=threaded(fetch),
            order=Order.ANY,
        )
    ]


PEER = Peer(name="spdl", needs=("spdl", "datasets"), contestants=_contestants)
