"""Tests of trainer/reconstruct.py."""

from __future__ import annotations

import numpy as np
import torch

from trainer.data import ClipBatch
from trainer.engine.stage import Item
from trainer.model import EncoderConfig
from trainer.pool.format import Pool
from trainer.randomness import sample_keys, stream
from trainer.reconstruct import (
    MaskStage,
    Reconstructor,
    ReconstructStage,
    random_masks,
    seeded_model,
)

CPU = torch.device("cpu")
TINY = EncoderConfig(width=16, depth=1, heads=2)


def test_masks_hide_as_much_of_each_clip_and_differ_between_clips_and_epochs() -> None:
    keys = sample_keys(str(n) for n in range(500))
    masks = random_masks(stream(1, "mask", 0), keys, 16, 0.4)
    assert (masks.sum(axis=1) == 6).all()
    assert len(np.unique(masks, axis=0)) > 400
    assert abs(masks.mean(axis=0) - 6 / 16).max() < 0.1
    assert (masks != random_masks(stream(1, "mask", 1), keys, 16, 0.4)).any(axis=1).mean() > 0.9
    assert (masks[7:9] == random_masks(stream(1, "mask", 0), keys[7:9], 16, 0.4)).all()


def test_a_mask_always_hides_a_patch_and_always_shows_one() -> None:
    keys = sample_keys(["a"])
    assert random_masks(stream(1, "m"), keys, 4, 0.01).sum() == 1
    assert random_masks(stream(1, "m"), keys, 4, 0.99).sum() == 3


def test_the_loss_is_the_squared_error_of_the_hidden_values_alone() -> None:
    torch.manual_seed(0)
    model = Reconstructor(EncoderConfig(length=16, patch=4, width=8, depth=1, heads=2))
    clips, mask = torch.randn(3, 16), torch.tensor([[True, False, True, False]] * 3)
    predicted = model.decode(model.encoder.tokens(clips, mask))
    expected = (predicted - clips.reshape(3, 4, 4))[mask].square().mean()
    torch.testing.assert_close(model(clips, mask), expected)


def test_the_untrained_model_follows_from_the_seed_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    models = [seeded_model(TINY, seed, CPU) for seed in (3, 3, 4)]
    assert torch.equal(torch.rand(1), expected)
    first, same, other = (model.encoder.position for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def batch(pool: Pool, rows: range) -> ClipBatch:
    numbers = np.array(rows)
    return ClipBatch(clips=pool.clips(numbers), rows=numbers, keys=pool.keys[numbers])


def test_what_is_hidden_of_a_clip_does_not_depend_on_its_batch(pool: Pool) -> None:
    stage = MaskStage(seed=1, patches=16, share=0.4, device=CPU)
    masks = [
        stage.process(Item(seq=seq, epoch=2, payload=batch(pool, rows))).payload.mask
        for seq, rows in ((7, range(10, 20)), (9, range(15, 17)))
    ]
    assert torch.equal(masks[0][5:7], masks[1])


def test_a_step_lowers_the_loss_at_the_rate_of_its_step(pool: Pool) -> None:
    rates = {0: 0.0, 1: 1e-2, 2: 1e-2}
    stage = ReconstructStage(seeded_model(TINY, 0, CPU), rates.__getitem__, weight_decay=0.0)
    mask = MaskStage(seed=1, patches=16, share=0.4, device=CPU)
    values = []
    for seq in range(3):
        item = Item(seq=seq, epoch=0, payload=batch(pool, range(64)))
        values.append(stage.process(mask.process(item)).payload)
    assert [value["train/rate"] for value in values] == [0.0, 1e-2, 1e-2]
    losses = [value["train/loss"] for value in values]
    assert losses[0] == losses[1]
    assert losses[2] < losses[1]
