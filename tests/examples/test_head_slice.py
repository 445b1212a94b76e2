"""The comparison of pilots, with little training: that it trains on what it says."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from trainer.data import Part
from trainer.pool.format import open_pool

COMPARE = Path(__file__).parents[2] / "examples" / "head_slice" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", COMPARE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_head_slice_knows_nothing_of_the_last_corpora(compare, tmp_path: Path):
    from trainer.pool.build import build_pool

    build_pool(tmp_path / "pool")
    pool = open_pool(tmp_path / "pool")
    pilots = compare.pilots(pool, 0)
    for index in pilots.values():
        assert index.size == compare.SIZE
        assert not pool.split.is_(Part.TEST)[index.rows].any()
    head, drawn = pilots["head slice"], pilots["random sample"]
    assert (np.sort(head.rows) == np.flatnonzero(~pool.split.is_(Part.TEST))[: head.size]).all()
    assert head.corpora["OSULeaf"] == head.corpora["PickupGestureWiimoteZ"] == 0
    assert min(drawn.corpora.values()) > 10
    told = compare.accuracies(pool, head, tmp_path / "runs", epochs=2)
    assert told["OSULeaf"] == 0.0
    assert set(told) == {*pool.corpus.names, compare.MEAN, compare.ALL}
