"""Hugging Face `datasets`, and torch's loaders over it.

A folder of `save_to_disk`, in each of its formats: rows are asked for a batch at a time, which
torch's DataLoader does by `__getitems__` when it is given a batch sampler. The Arrow format has
no such rows; there a batch is a table, by a sampler of lists and no batching. Ragged rows are
padded by torch's own `pad_sequence`.

- https://huggingface.co/docs/datasets/use_with_pytorch: formats, several workers, the iterable
  form, and `StatefulDataLoader` for a loader that resumes
- https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable: many shards, and a buffer to
  shuffle in
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from trainer.bench.batches import Batch, Plan, Rows, pad
from trainer.bench.contestant import Batches, Contestant, Order, Part, Peer, Start, Work
from trainer.bench.corpus import prepared, record_batches
from trainer.bench.peers.torch_loader import budgeted, closing_workers, tensors

ITERABLE_SHARDS = 64
SHUFFLE_BUFFER = 1000
WORKERS = (0, 2)


def saved(work: Work) -> Path:
    """Return the corpus as a folder of `save_to_disk`, written there when it is missing."""

    def build(folder: Path) -> None:
        from datasets import Dataset

        table = pa.Table.from_batches(record_batches(work.corpus))
        Dataset(table).save_to_disk(str(folder), num_shards=len(work.corpus.shards))

    return prepared(work.folder / f"datasets-{work.corpus.folder.name}", build)


def opened(work: Work, form: str | None) -> Any:
    """Return the dataset in one of its formats; None gives Python's own lists."""
    from datasets import load_from_disk

    return load_from_disk(str(saved(work))).with_format(form)


def of_lists(rows: Sequence[dict[str, list[int]]]) -> Batch:
    """Pad rows of Python numbers."""
    ids = [torch.tensor(row["ids"], dtype=torch.int32) for row in rows]
    mask = [torch.tensor(row["mask"], dtype=torch.int8) for row in rows]
    return Batch(pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True))


def of_tensors(rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
    """Pad rows of tensors, which the torch format makes int64 whatever they were."""
    ids = pad_sequence([row["ids"] for row in rows], batch_first=True)
    mask = pad_sequence([row["mask"] for row in rows], batch_first=True)
    return Batch(ids.to(torch.int32), mask.to(torch.int8))


def of_arrays(rows: Sequence[dict[str, NDArray[Any]]]) -> Batch:
    """Pad rows of NumPy arrays."""
    return tensors(pad([(row["ids"], row["mask"]) for row in rows]))


def of_table(table: pa.Table) -> Batch:
    """Pad the rows of an Arrow table."""
    return tensors(pad(table_rows(table)))


def by_arrow(work: Work) -> Callable[[Rows], Batch]:
    """Return what makes a batch of rows by the arrow format, which is fastest there."""
    dataset = opened(work, "arrow")

    def fetch(rows: Rows) -> Batch:
        return of_table(dataset[rows.tolist()])

    return fetch


def table_rows(table: pa.Table) -> list[tuple[NDArray[np.int32], NDArray[np.int8]]]:
    """Return views of a table's rows: its values as they lie, cut at its offsets."""
    ids, mask = (table.column(name).combine_chunks() for name in ("ids", "mask"))
    stops = np.cumsum(ids.value_lengths().to_numpy())[:-1]
    both = (np.split(column.flatten().to_numpy(), stops) for column in (ids, mask))
    return list(zip(*both, strict=True))


# Name, format, and how a batch is made of what a batch of rows comes as.
FORMS: tuple[tuple[str, str | None, Callable[[Any], Batch]], ...] = (
    ("Python rows", None, of_lists),
    ("torch format", "torch", of_tensors),
    ("numpy format", "numpy", of_arrays),
    ("arrow format", "arrow", of_table),
)


def _map_style(
    loader: Callable[..., Any], dataset: Any, form: str | None, collate: Any, workers: int
) -> Start:
    def start(plan: Plan) -> Batches:
        lists = [rows.tolist() for rows in plan]
        how: dict[str, Any] = {"batch_sampler": lists}
        if form == "arrow":
            how = {"sampler": lists, "batch_size": None}
        made = loader(dataset, collate_fn=collate, num_workers=workers, **how)
        yield from closing_workers(made)

    return start


def _iterable(work: Work, workers: int) -> Start:
    def start(plan: Plan) -> Batches:
        seed = int(plan[0][0])
        stored = opened(work, None)
        rows = stored.to_iterable_dataset(num_shards=min(ITERABLE_SHARDS, len(stored)))
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER).with_format("numpy")
        yield from budgeted(rows, lambda row: (row["ids"], row["mask"]), workers=workers)

    return start


def _contestants(work: Work) -> list[Contestant]:
    from torch.utils.data import DataLoader

    found = [
        Contestant(
            name=f"DataLoader on datasets, {name}, {workers} workers",
            part=Part.PEER,
            start=_map_style(DataLoader, opened(work, form), form, collate, workers),
        )
        for name, form, collate in FORMS
        for workers in WORKERS
    ]
    found += [
        Contestant(
            name=f"DataLoader on datasets, iterable, {workers} workers",
            part=Part.PEER,
            start=_iterable(work, workers),
            order=Order.OWN,
        )
        for workers in WORKERS
    ]
    return found


def _stateful(work: Work) -> list[Contestant]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return [
        Contestant(
            name=f"StatefulDataLoader on datasets, torch format, {workers} workers",
            part=Part.PEER,
            start=_map_style(
                StatefulDataLoader, opened(work, "torch"), "torch", of_tensors, workers
            ),
        )
        for workers in WORKERS
    ]


PEER = Peer(name="datasets", needs=("datasets",), contestants=_contestants)
STATEFUL = Peer(name="torchdata", needs=("torchdata", "datasets"), contestants=_stateful)
