"""The benchmark of the loader, from the corpus to the report."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.bench import Figure, Report, machine
from protocol.errors import UsageError
from trainer.bench import clips, cold, memory, ours, plans, sparse
from trainer.bench.contestant import Contestant, Peer, Work
from trainer.bench.corpus import Corpus, open_corpus
from trainer.bench.figures import race_figures
from trainer.bench.peers import PEERS
from trainer.bench.race import FULL, QUICK, race
from trainer.bench.waiting import waiting
from trainer.loader import open_rows
from trainer.loader.rows import Rows as Source

ROWS = 200_000
QUICK_ROWS = 20_000
PACKAGES = (
    *("torch", "numpy", "numba", "pyarrow", "datasets", "torchdata", "spdl", "grain"),
    *("mosaicml-streaming", "litdata", "webdataset"),
)
WHAT = "trainer bench loader"


@dataclass(kw_only=True)
class Bench:
    """What is measured, where and how; `left_out` says what could not be, and why."""

    folder: Path
    quick: bool
    peers: Sequence[Peer]
    say: Callable[[str], None]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return QUICK_ROWS if self.quick else ROWS

    def corpus(self) -> Corpus:
        return open_corpus(self.folder, rows=self.rows)

    def source(self) -> Source:
        return open_rows(self.corpus().shards, columns=ours.COLUMNS)

    def clips(self) -> list[Path]:
        return clips.write_clips(self.folder, clips.QUICK if self.quick else clips.FULL)


def _race(bench: Bench) -> list[Figure]:
    corpus = bench.corpus()
    work = Work(corpus=corpus, folder=bench.folder)
    contestants = [*ours.contestants(work), *_others(bench, work)]
    plan = ours.plan_batches(bench.source())
    standings = race(contestants, corpus, plan, QUICK if bench.quick else FULL, bench.say)
    bench.left_out |= standings.fallen
    tokens = float(corpus.lengths.sum()) / len(plan)
    ms = {title: standings.ms_a_batch(title, tokens) for title in standings.turns}
    return race_figures(contestants, ms)


def _others(bench: Bench, work: Work) -> Iterator[Contestant]:
    for peer in bench.peers:
        if missing := peer.missing():
            bench.left_out[peer.name] = f"{missing} is not installed"
            continue
        bench.say(f"preparing {peer.name}")
        yield from peer.contestants(work)


def _plan(bench: Bench) -> list[Figure]:
    source = bench.source()
    return [
        *plans.real_tokens(source),
        plans.correlation(source),
        *plans.planning(source),
        *plans.resuming(source),
    ]


# In this order: a cold disk needs files that nobody has mapped yet.
FIGURES: Mapping[str, Callable[[Bench], list[Figure]]] = {
    "cold": lambda bench: cold.figures(bench.corpus().shards),
    "race": _race,
    "clips": lambda bench: clips.figures(bench.clips(), ours.kernels()),
    "plan": _plan,
    "wait": lambda bench: waiting(bench.source()),
    "memory": lambda bench: memory.figures(bench.clips()[0].parent),
    "open": lambda bench: sparse.figures(bench.folder),
}


def chosen_peers(names: Sequence[str]) -> list[Peer]:
    """Return the peers of these names, all for no name. Raises UsageError for an unknown one."""
    return [each for each in PEERS if each.name in _known(names, [p.name for p in PEERS], "peer")]


def chosen_figures(names: Sequence[str]) -> list[str]:
    """Return the figures of these names, all for no name. Raises UsageError for an unknown one."""
    known = _known(names, list(FIGURES), "figure")
    return [name for name in FIGURES if name in known]


def _known(names: Sequence[str], all_of_them: Sequence[str], what: str) -> Sequence[str]:
    for name in names:
        if name not in all_of_them:
            hint = f"There are {', '.join(all_of_them)}."
            raise UsageError(WHAT, why=f"there is no {what} {name!r}", hint=hint)
    return names or all_of_them


def run(
    folder: Path,
    *,
    quick: bool,
    only: Sequence[str],
    peers: Sequence[str],
    say: Callable[[str], None],
) -> Report:
    """Measure, and return the report.

    The corpus and its other formats are kept in `folder`, 1 GB a format, or used as they are there.
    Raises UsageError for a figure or a peer that there is not, DataError when a loader yields
    something else than the corpus or the folder cannot be written.
    """
    bench = Bench(folder=folder.resolve(), quick=quick, peers=chosen_peers(peers), say=say)
    figures: list[Figure] = []
    for name in chosen_figures(only):
        say(f"measuring {name}")
        figures += FIGURES[name](bench)
    here = machine() | {"form": "quick" if quick else "full", "packages": _versions()}
    if bench.left_out:
        here["left out"] = "; ".join(f"{name}: {why}" for name, why in bench.left_out.items())
    return Report(bench="loader", machine=here, figures=tuple(figures))


def _versions() -> str:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return " ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
