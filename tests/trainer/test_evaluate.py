import numpy as np
import pytest
import torch
from torch import nn

from trainer.evaluate import accuracy, by_corpus, cross_entropy, macro_accuracy, torch_logits

LOGITS = np.array([[2, 1, 0], [0, 3, 1], [1, 0, 0], [0, 1, 5]], dtype=np.float32)
TARGETS = np.array([0, 1, 1, 2])


def test_accuracy_counts_clips_and_macro_accuracy_classes():
    logits = np.concatenate([LOGITS, LOGITS[:1]])
    targets = np.concatenate([TARGETS, TARGETS[:1]])
    assert accuracy(logits, targets) == pytest.approx(4 / 5)
    assert macro_accuracy(logits, targets) == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_cross_entropy_is_torchs_and_bears_huge_logits():
    expected = nn.functional.cross_entropy(torch.from_numpy(LOGITS), torch.from_numpy(TARGETS))
    assert cross_entropy(LOGITS, TARGETS) == pytest.approx(float(expected), rel=1e-6)
    assert cross_entropy(LOGITS * 1e4, TARGETS) == pytest.approx(1e4 / 4)


def test_values_are_averaged_by_corpus():
    values = np.array([1.0, 0.0, 0.0])
    assert by_corpus(values, np.array(["b", "a", "b"])) == {"a": 0.0, "b": 0.5}


@pytest.mark.parametrize("batch_size", [1, 3, 10, 100])
def test_the_batch_size_does_not_change_the_logits(batch_size):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    clips = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
    expected = model(torch.from_numpy(clips)).detach().numpy()
    assert torch_logits(model, clips, batch_size=batch_size) == pytest.approx(expected, abs=1e-6)
