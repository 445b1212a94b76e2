"""What a classifier is measured by while it is fine-tuned: the clips kept for validation."""

from __future__ import annotations

import numpy as np

from trainer.classifier import Classifier
from trainer.evaluate import (
    Logits,
    accuracy,
    by_corpus,
    cross_entropy,
    macro_accuracy,
    torch_logits,
)
from trainer.pool.format import Pool, Rows


class Validation:
    """Measures a classifier on the clips that it does not learn from."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self.clips = pool.clips(rows)
        self.targets = pool.class_ids[rows].astype(np.int64)
        self.corpus = pool.corpus[rows]

    def measure(self, model: Classifier) -> dict[str, float]:
        """Return accuracy, accuracy with every class counting alike, and cross-entropy."""
        return self._measure(torch_logits(model, self.clips))

    def report(self, model: Classifier) -> dict[str, float]:
        """Return the same and the accuracy by corpus, named as in a stage's report."""
        logits = torch_logits(model, self.clips)
        right = (logits.argmax(axis=1) == self.targets).astype(np.float64)
        corpora = by_corpus(right, self.corpus)
        return {
            **{f"validation_{name}": value for name, value in self._measure(logits).items()},
            **{f"validation_accuracy/{name}": value for name, value in corpora.items()},
        }

    def _measure(self, logits: Logits) -> dict[str, float]:
        return {
            "accuracy": accuracy(logits, self.targets),
            "macro_accuracy": macro_accuracy(logits, self.targets),
            "loss": cross_entropy(logits, self.targets),
        }
