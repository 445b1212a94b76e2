"""Unbiased subsets of a pool, as index files that name the pool by its content hash.

A pilot that took the head of a pool had trained on the first corpus almost alone. Here a sample
is the clips whose keyed hash comes first (`trainer/randomness.py`): uniformly random without
replacement, independent of how the pool is cut into shards, and nested: with one seed the sample
of 10,000 lies within the sample of 30,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist

import numpy as np

from protocol.errors import DataError, UsageError
from protocol.publish import make_dirs, publish_json
from trainer.apportion import largest_remainder
from trainer.config import require_seed
from trainer.files import read_record, writing
from trainer.pool.format import Pool, Rows
from trainer.randomness import order, stream

VERSION = 1
CONFIDENCE = 0.999


class Method(StrEnum):
    """How the clips of a sample were chosen."""

    UNIFORM = "uniform"
    STRATIFIED = "stratified"  # each corpus in proportion, by largest remainder


@dataclass(frozen=True, kw_only=True)
class BiasTest:
    """A chi-squared test that no corpus is favoured.

    `statistic` is compared with `bound`, which an unbiased sample stays under with a probability
    of 0.999; `freedom` is the number of corpora less one.
    """

    statistic: float
    bound: float
    freedom: int
    passed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexFile:
    """A sample of the pool whose content hash is `pool`: its rows (size,), ascending."""

    pool: str
    method: Method
    seed: int
    rows: Rows
    corpora: Mapping[str, int]
    bias: BiasTest

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class IndexRecord:
    """An index file as it is in JSON: `IndexFile` with a version and its size."""

    version: int
    pool: str
    method: Method
    seed: int
    size: int
    corpora: Mapping[str, int]
    bias: BiasTest
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}; this program reads {VERSION}")
        if not self.size or not self.size == len(self.rows) == len(set(self.rows)):
            raise ValueError(f"it does not hold {self.size} different rows, at least one")


def sample(pool: Pool, size: int, seed: int, *, stratify: bool = False) -> IndexFile:
    """Draw `size` clips of the pool without replacement.

    Raises UsageError when the pool does not hold as many, or for a seed out of range.
    """
    require_seed("the sample", seed)
    if not 1 <= size <= pool.rows:
        raise UsageError(
            "sample the pool",
            path=pool.folder,
            why=f"size is {size}; the pool holds {pool.rows} clips",
            hint=f"Choose a size from 1 to {pool.rows}.",
        )
    ranked = order(stream(seed, "sample"), pool.keys)
    rows = _stratified(pool, ranked, size) if stratify else ranked[:size]
    rows = np.sort(rows)
    return IndexFile(
        pool=pool.content_hash,
        method=Method.STRATIFIED if stratify else Method.UNIFORM,
        seed=seed,
        rows=rows,
        corpora=corpus_counts(pool, rows),
        bias=bias_test(pool, rows),
    )


def _stratified(pool: Pool, ranked: Rows, size: int) -> Rows:
    counts = corpus_counts(pool, ranked)
    quotas = largest_remainder(counts, size)
    of_corpus = {name: ranked[pool.corpus.is_(name)[ranked]] for name in counts}
    return np.concatenate([of_corpus[name][:quota] for name, quota in quotas.items()])


def corpus_counts(pool: Pool, rows: Rows) -> dict[str, int]:
    """Return, for every corpus of the pool by name, how many of `rows` are of it."""
    names = pool.corpus.names
    counts = np.bincount(pool.corpus.codes[rows], minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))


def bias_test(pool: Pool, rows: Rows) -> BiasTest:
    """Test whether `rows` could be a uniformly random sample of the pool's corpora.

    Pearson's statistic over the corpora, times (N-1)/(N-n): drawing n of N without replacement
    shrinks the counts' covariance by that factor against multinomial draws (the multivariate
    hypergeometric distribution), after which the statistic is chi-squared in the limit.
    """
    held = np.array(list(pool.manifest.corpora.values()), dtype=np.float64)
    counts = corpus_counts(pool, rows)
    drawn = np.array([counts[name] for name in pool.manifest.corpora], dtype=np.float64)
    total, size, freedom = pool.rows, len(rows), len(held) - 1
    statistic = 0.0
    if size < total:
        expected = held * size / total
        pearson = float(((drawn - expected) ** 2 / expected).sum())
        statistic = pearson * (total - 1) / (total - size)
    bound = chi_squared_bound(freedom) if freedom else 0.0
    return BiasTest(statistic=statistic, bound=bound, freedom=freedom, passed=statistic <= bound)


def chi_squared_bound(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return the `confidence` quantile of chi-squared with `freedom` degrees of freedom.

    Wilson and Hilferty's cube-root approximation ("The distribution of chi-square", PNAS 17,
    1931): within 0.3 of the exact quantile at 0.999 from three degrees on.
    """
    spread = 2.0 / (9.0 * freedom)
    z = NormalDist().inv_cdf(confidence)
    return float(freedom * (1.0 - spread + z * spread**0.5) ** 3)


def write_index(path: Path, index: IndexFile) -> None:
    """Publish an index file, over an older one if need be.

    Raises UsageError when there is a file that is no index, which is left alone; DataError when
    the file cannot be written.
    """
    written = IndexRecord(
        version=VERSION,
        pool=index.pool,
        method=index.method,
        seed=index.seed,
        size=index.size,
        corpora=index.corpora,
        bias=index.bias,
        rows=tuple(index.rows.tolist()),
    )
    what = "write the index"
    try:
        read_record(IndexRecord, path, what=what)
    except DataError as error:
        raise UsageError(
            what,
            path=path,
            why="there is something else, which is left alone",
            hint="Choose another --output.",
        ) from error
    with writing(what, path):
        make_dirs(path.absolute().parent)
        publish_json(path, asdict(written))


def read_index(path: Path, pool: Pool) -> IndexFile:
    """Read an index file of this pool.

    Raises DataError when it is missing, malformed, or the index of another pool.
    """
    what, hint = "read the index", "Draw it again with `trainer pool sample`."
    written = read_record(IndexRecord, path, what=what, hint=hint)
    if written is None:
        raise DataError(what, path=path, why="no such file", hint=hint)
    rows = np.array(written.rows, dtype=np.int64)
    if written.pool != pool.content_hash:
        why = f"it is of the pool {written.pool[:12]}, not of {pool.content_hash[:12]}"
        raise DataError(what, path=path, why=f"{why} in {pool.folder}", hint=hint)
    if rows.min() < 0 or rows.max() >= pool.rows:
        raise DataError(what, path=path, why="it names rows that the pool lacks", hint=hint)
    return IndexFile(
        pool=written.pool,
        method=written.method,
        seed=written.seed,
        rows=rows,
        corpora=written.corpora,
        bias=written.bias,
    )
