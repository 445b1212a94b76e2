"""What a head slice does to the result: the same training on it, and on a random sample as large.

    python examples/head_slice/compare.py runs/head_slice

A pool stands corpus after corpus, as a naive writer leaves it, and a pilot that takes its first
clips trains on the first corpora alone. For three seeds this pretrains and fine-tunes on either,
half of the clips that there are to learn from, and asks both all of the pool's test clips. Prints a
table, and draws it. Takes some minutes on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from trainer.arms import Arm
from trainer.classifier import load_classifier
from trainer.data import Part, split_indices
from trainer.finetune import FinetuneConfig, finetune
from trainer.pool.build import build_pool
from trainer.pool.format import Pool, Rows, open_pool
from trainer.pool.manifest import MANIFEST
from trainer.pool.sample import IndexFile, Method, bias_test, corpus_counts, write_index
from trainer.pretrain import PretrainConfig, pretrain
from trainer.randomness import order, stream
from trainer.run import open_run
from trainer.validation import Validation

SIZE, SEEDS, EPOCHS = 250, (0, 1, 2), 100
MEAN, ALL = "mean of the corpora", "all test clips"
Accuracies = dict[str, float]


def pilots(pool: Pool, seed: int) -> dict[str, IndexFile]:
    """Return the two ways to take a part of the clips that there are to learn from."""
    learnt = np.flatnonzero(~pool.split.is_(Part.TEST))
    drawn = learnt[order(stream(seed, "sample"), pool.keys[learnt])[:SIZE]]
    parts = {"head slice": learnt[:SIZE], "random sample": np.sort(drawn)}
    return {way: index_of(pool, rows, seed) for way, rows in parts.items()}


def index_of(pool: Pool, rows: Rows, seed: int) -> IndexFile:
    """Return an index file of these rows."""
    return IndexFile(
        pool=pool.content_hash,
        method=Method.UNIFORM,
        seed=seed,
        rows=rows,
        corpora=corpus_counts(pool, rows),
        bias=bias_test(pool, rows),
    )


def accuracies(pool: Pool, index: IndexFile, folder: Path, *, epochs: int = EPOCHS) -> Accuracies:
    """Train on a sample; return the accuracy on the test clips of each corpus, and of all."""
    path = folder / "index.json"
    write_index(path, index)
    about = {"pool": pool.folder, "index": path, "seed": index.seed, "epochs": epochs}
    with open_run("pretrain", output=folder, environ={}) as run:
        run.finish(pretrain(PretrainConfig(**about), run))
    with open_run("finetune", output=folder, environ={}) as run:
        # The full arm has no probe, whose epochs must be fewer all the same.
        run.finish(finetune(FinetuneConfig(**about, arm=(Arm.FULL,), probe_epochs=1), run))
    (trained,) = folder.glob("artifacts/finetune.*/full/classifier.safetensors")
    model, _ = load_classifier(trained)
    report = Validation(pool, split_indices(pool, Part.TEST)).report(model)
    prefix = "validation_accuracy/"
    by_corpus = {k.removeprefix(prefix): v for k, v in report.items() if k.startswith(prefix)}
    return {
        **by_corpus,
        MEAN: statistics.mean(by_corpus.values()),
        ALL: report["validation_accuracy"],
    }


def table(rows: Mapping[str, list[Accuracies]], shares: Mapping[str, Mapping[str, int]]) -> str:
    """Return mean and spread over the seeds, by corpus, as Markdown."""
    names = [*next(iter(shares.values())), MEAN, ALL]
    lines = [f"| corpus | {' | '.join(f'{way}: clips | {way}: accuracy' for way in rows)} |"]
    lines.append("|---" * (1 + 2 * len(rows)) + "|")
    for name in names:
        cells = []
        for way, seeds in rows.items():
            values = [100 * each[name] for each in seeds]
            cells.append(str(shares[way].get(name, "")))
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Mapping[str, list[Accuracies]], path: Path) -> None:
    """Draw the accuracies, a bar a corpus and way, a dot a seed."""
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(rows.values()))[0])
    for at, (way, seeds) in enumerate(rows.items()):
        places = np.arange(len(names)) + (at - 0.5) * 0.4
        values = np.array([[100 * each[name] for name in names] for each in seeds])
        axes.bar(places, values.mean(axis=0), 0.4, label=way)
        axes.scatter(np.tile(places, len(seeds)), values.reshape(-1), s=8, color="black", zorder=2)
    labels = [name.replace(" ", "\n", 1).replace("Gesture", "-\nGesture") for name in names]
    axes.set_xticks(np.arange(len(names)), labels, fontsize=8)
    axes.set_ylabel("test accuracy (%)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    place = folder / "pool"
    if not (place / MANIFEST).exists():
        build_pool(place)
    pool = open_pool(place)
    found: dict[str, list[Accuracies]] = {}
    for seed in SEEDS:
        for way, index in pilots(pool, seed).items():
            told = accuracies(pool, index, folder / f"{way.replace(' ', '-')}-{seed}")
            found.setdefault(way, []).append(told)
    print(table(found, {way: index.corpora for way, index in pilots(pool, SEEDS[0]).items()}))
    draw(found, folder / "head-slice.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/head_slice"))
