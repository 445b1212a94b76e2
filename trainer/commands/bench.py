"""`trainer bench`: measures, and prints a table or JSON."""

from __future__ import annotations

import contextlib
import json as jsonlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from trainer.bench import loader as bench
from trainer.bench.report import print_table
from trainer.cli import examples
from trainer.console import say

Names = Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)]

app = App(
    name="bench",
    help="Measure what the trainer does, beside what else could be used.",
    help_epilogue=examples("trainer bench loader --quick"),
)


@app.command(
    help_epilogue=examples(
        "trainer bench loader --folder bench --json > loader.json",
        "trainer bench loader --quick --only race --peers datasets litdata",
        "trainer bench loader --only plan wait",
    )
)
def loader(
    *,
    folder: Path | None = None,
    quick: bool = False,
    only: Names = (),
    peers: Names = (),
    json: bool = False,
) -> None:
    """Measure the loader beside memcpy and beside what else loads tokens, all in turns.

    200,000 sequences of random tokens, in padded batches of 65,536 slots, in
    random order; what each loader yields is checked first. A peer that is not
    installed is left out, and named. A goal that is missed changes nothing.

    Parameters
    ----------
    folder
        Where the corpus is kept, 1 GB for each format; by default
        in a temporary folder.
    quick
        A tenth of the rows, and fewer rounds.
    only
        What to measure, all by default: cold, race, clips, plan,
        wait, memory, open.
    peers
        Whom to race, all by default: datasets, torchdata, spdl,
        grain, mosaicml, litdata, webdataset; fed-torch, fed-spdl
        and fed-grain are fed with our rows.
    json
        Print the report as JSON.
    """
    with _kept(folder) as place:
        report = bench.run(place, quick=quick, only=only, peers=peers, say=say)
    if json:
        print(jsonlib.dumps(report.to_json(), indent=1))
    else:
        print_table(Console(), report)


@contextlib.contextmanager
def _kept(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as name:
        yield Path(name)
