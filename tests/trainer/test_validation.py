"""Tests of trainer/validation.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.classifier import Classifier
from trainer.data import Part, split_indices
from trainer.model import ClipEncoder, EncoderConfig
from trainer.pool.format import Pool
from trainer.validation import Validation


@pytest.fixture
def always_the_first(pool: Pool) -> Classifier:
    """A classifier that answers with the first class, `ACSF1/0`, whatever it is shown."""
    model = Classifier(ClipEncoder(EncoderConfig(width=8, depth=1, heads=2)), pool.classes)
    with torch.no_grad():
        model.head.bias[0] = 1.0
    return model


def test_the_measures_are_those_of_the_rows(pool: Pool, always_the_first: Classifier) -> None:
    rows = split_indices(pool, Part.VALIDATION)
    right = pool.class_ids[rows] == 0
    measured = Validation(pool, rows).measure(always_the_first)
    assert measured["accuracy"] == pytest.approx(right.mean())
    assert measured["macro_accuracy"] == pytest.approx(1 / len(np.unique(pool.class_ids[rows])))


def test_the_report_names_every_corpus(pool: Pool, always_the_first: Classifier) -> None:
    rows = split_indices(pool, Part.VALIDATION)
    report = Validation(pool, rows).report(always_the_first)
    mine = rows[pool.corpus[rows] == "ACSF1"]
    share = (pool.class_ids[mine] == 0).mean()
    assert report["validation_accuracy/ACSF1"] == pytest.approx(share)
    assert report["validation_accuracy/GunPoint"] == 0.0
    assert {f"validation_accuracy/{name}" for name in pool.corpus.names} <= set(report)
