"""`trainer pool build`, `describe` and `sample`."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from trainer.cli import examples
from trainer.pool.build import CORPORA, LENGTH, SHARDS, build_pool
from trainer.pool.describe import describe, describe_table, plot_shares
from trainer.pool.format import open_pool
from trainer.pool.sample import read_index, sample, write_index

app = App(
    name="pool",
    help="The pool of clips: build one, look into one, draw a sample of one.",
    help_epilogue=examples(
        "trainer pool build --output pool",
        "trainer pool describe pool",
        "trainer pool sample pool --size 500 --seed 1 --output pilot.json",
    ),
)


@app.command(
    help_epilogue=examples(
        "trainer pool build --output pool",
        "trainer pool build --corpora GunPoint --corpora OSULeaf --shards 2",
    )
)
def build(
    *,
    output: Path = Path("pool"),
    corpora: tuple[str, ...] = CORPORA,
    length: int = LENGTH,
    shards: int = SHARDS,
    json: bool = False,
) -> None:
    """Build a pool of real, labelled clips out of the package aeon; nothing is downloaded.

    Parameters
    ----------
    output
        Folder to write the pool to; one that is there is replaced.
    corpora
        Names of the corpora; repeat the option for each.
    length
        Values in a clip: each series is resampled to it, then z-normalised.
    shards
        Number of Arrow files.
    json
        Print the pool's manifest as JSON.
    """
    manifest = build_pool(output, corpora=corpora, length=length, shards=shards)
    if json:
        print(jsonlib.dumps(asdict(manifest), indent=1))
    else:
        Console().print(describe_table(open_pool(output)))


@app.command(
    name="describe",
    help_epilogue=examples(
        "trainer pool describe pool --check",
        "trainer pool describe pool --index pilot.json --plot shares.png",
    ),
)
def describe_command(
    pool: Path = Path("pool"),
    *,
    index: Path | None = None,
    plot: Path | None = None,
    check: bool = False,
    json: bool = False,
) -> None:
    """Show what a pool holds, by corpus, and what a sample took of it.

    Parameters
    ----------
    pool
        Folder of the pool.
    index
        Index file of a sample, to be shown beside the pool and a head slice as large.
    plot
        Write a bar chart of the corpora's shares to this PNG file.
    check
        Hash every row again, and compare with the pool's content hash.
    json
        Print the description as JSON.
    """
    opened = open_pool(pool)
    if check:
        opened.check_content()
    sampled = None if index is None else read_index(index, opened)
    if plot is not None:
        plot_shares(opened, plot, sampled)
    if json:
        print(jsonlib.dumps(describe(opened, sampled), indent=1))
    else:
        Console().print(describe_table(opened, sampled))


@app.command(
    name="sample",
    help_epilogue=examples("trainer pool sample pool --size 500 --seed 1 --output pilot.json"),
)
def sample_command(
    pool: Path = Path("pool"),
    *,
    size: int,
    seed: int = 0,
    stratify: bool = False,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("index.json"),
    json: bool = False,
) -> None:
    """Draw clips uniformly at random without replacement, and write them as an index file.

    Parameters
    ----------
    pool
        Folder of the pool.
    size
        Number of clips.
    seed
        The same seed draws the same clips, and a smaller sample of it is part of a larger one.
    stratify
        Take of each corpus its share of the pool, by largest remainder.
    output
        The index file to write.
    json
        Print what was drawn as JSON.
    """
    opened = open_pool(pool)
    index = sample(opened, size, seed, stratify=stratify)
    write_index(output, index)
    if json:
        print(jsonlib.dumps(describe(opened, index)["sample"], indent=1))
        return
    console = Console()
    console.print(describe_table(opened, index))
    bias = index.bias
    verdict = "no corpus is favoured" if bias.passed else "a corpus is favoured"
    console.print(
        f"chi-squared {bias.statistic:.2f}, bound {bias.bound:.2f} (99.9%): {verdict}; "
        f"wrote {output}"
    )
