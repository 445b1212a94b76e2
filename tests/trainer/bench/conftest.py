"""A small corpus, written once: 400 rows, which are some ten batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.bench.contestant import Work
from trainer.bench.corpus import open_corpus

ROWS = 400


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The corpus, and the folder for its other formats. Not to be written to by hand."""
    folder: Path = tmp_path_factory.mktemp("work")
    return Work(corpus=open_corpus(folder, rows=ROWS), folder=folder)
