"""`trainer pool describe`: what is in a pool, and what a sample took of it.

Beside a sample stands the head slice of the same size, which is what a reader that takes the
first clips would have trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from protocol.publish import publishing
from trainer.files import writing
from trainer.pool.format import Pool
from trainer.pool.sample import IndexFile, bias_test, corpus_counts


@dataclass(frozen=True, kw_only=True)
class CorpusRow:
    """One corpus: clips in all and by split, classes, the lengths its series had (min, max).

    `sampled` and `head` count the clips in the sample and in a head slice as large; None
    without a sample.
    """

    corpus: str
    clips: int
    train: int
    test: int
    classes: int
    lengths: tuple[int, int] | None
    sampled: int | None = None
    head: int | None = None


def corpus_rows(pool: Pool, index: IndexFile | None = None) -> list[CorpusRow]:
    """Return what each corpus of the pool consists of, by name."""
    sampled = {} if index is None else corpus_counts(pool, index.rows)
    head = {} if index is None else corpus_counts(pool, np.arange(index.size))
    rows = []
    for name, clips in sorted(pool.manifest.corpora.items()):
        mine = pool.corpus.is_(name)
        rows.append(
            CorpusRow(
                corpus=name,
                clips=clips,
                train=int((mine & pool.split.is_("train")).sum()),
                test=int((mine & pool.split.is_("test")).sum()),
                classes=len(np.unique(pool.label.codes[mine])),
                lengths=_lengths(pool, name),
                sampled=sampled.get(name),
                head=head.get(name),
            )
        )
    return rows


def _lengths(pool: Pool, corpus: str) -> tuple[int, int] | None:
    """Return what the manifest says of a corpus' original lengths; a note, that may be missing."""
    match pool.manifest.preprocessing.get("original_lengths"):
        case {**noted} if corpus in noted:
            match noted[corpus]:
                case [int(low), int(high)]:
                    return low, high
    return None


def describe(pool: Pool, index: IndexFile | None = None) -> dict[str, Any]:
    """Return a description as JSON: rows, length, hash, corpora, and the sample's bias test."""
    described: dict[str, Any] = {
        "pool": str(pool.folder),
        "rows": pool.rows,
        "length": pool.length,
        "content_hash": pool.content_hash,
        "shards": len(pool.manifest.shards),
        "classes": len(pool.classes),
        "preprocessing": dict(pool.manifest.preprocessing),
        "corpora": [vars(row) for row in corpus_rows(pool, index)],
    }
    if index is not None:
        head = bias_test(pool, np.arange(index.size))
        described["sample"] = {
            "size": index.size,
            "seed": index.seed,
            "method": str(index.method),
            "bias": vars(index.bias),
            "head_bias": vars(head),
        }
    return described


def describe_table(pool: Pool, index: IndexFile | None = None) -> Table:
    """Return the description as a table for a terminal."""
    title = f"{pool.rows} clips of {pool.length} values, pool {pool.content_hash[:12]}"
    table = Table(title=title, title_justify="left")
    names = ["corpus", "clips", "share"]
    if index is None:
        names += ["train", "test", "classes", "length"]
    else:
        names += ["sample", "share", "head slice", "share"]
    for name in names:
        table.add_column(name, justify="left" if name == "corpus" else "right", no_wrap=True)
    for row in corpus_rows(pool, index):
        table.add_row(
            row.corpus, str(row.clips), f"{row.clips / pool.rows:.1%}", *_cells(row, index)
        )
    return table


def _cells(row: CorpusRow, index: IndexFile | None) -> list[str]:
    if index is None:
        lengths = "" if row.lengths is None else "-".join(str(n) for n in sorted(set(row.lengths)))
        return [str(row.train), str(row.test), str(row.classes), lengths]
    counts = (row.sampled or 0, row.head or 0)
    return [cell for n in counts for cell in (str(n), f"{n / index.size:.1%}")]


def plot_shares(pool: Pool, path: Path, index: IndexFile | None = None) -> None:
    """Publish a bar chart (PNG) of each corpus' share of pool, sample and head slice."""
    from matplotlib.figure import Figure

    rows = corpus_rows(pool, index)
    series = {"pool": [100 * row.clips / pool.rows for row in rows]}
    if index is not None:
        series["sample"] = [100 * (row.sampled or 0) / index.size for row in rows]
        series["head slice"] = [100 * (row.head or 0) / index.size for row in rows]
    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    places, width = np.arange(len(rows)), 0.8 / len(series)
    for at, (name, shares) in enumerate(series.items()):
        bars = axes.bar(places + (at - (len(series) - 1) / 2) * width, shares, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(places, [row.corpus for row in rows])
    axes.set_ylabel("share of clips (%)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with writing("draw the chart", path), publishing(path) as file:
        figure.savefig(file, format="png", dpi=150)
