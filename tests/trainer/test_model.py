"""Tests of trainer/model.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.errors import DataError, UsageError
from trainer.model import ClipEncoder, EncoderConfig, load_encoder, save_encoder

SMALL = EncoderConfig(length=32, patch=8, width=16, depth=2, heads=2)


@pytest.fixture
def encoder() -> ClipEncoder:
    torch.manual_seed(0)
    return ClipEncoder(SMALL).eval()


def test_shapes_are_as_documented(encoder: ClipEncoder) -> None:
    clips = torch.randn(5, 32)
    assert encoder.features(clips).shape == (5, 16)
    assert encoder.tokens(clips).shape == (5, 4, 16)
    assert encoder(clips).dtype == torch.float32


def test_a_clips_embedding_does_not_depend_on_its_batch(encoder: ClipEncoder) -> None:
    clips = torch.randn(6, 32)
    alone = torch.cat([encoder(clip[None]) for clip in clips])
    torch.testing.assert_close(encoder(clips), alone, rtol=1e-5, atol=1e-6)


def test_a_hidden_patch_cannot_be_seen(encoder: ClipEncoder) -> None:
    clips = torch.randn(1, 32)
    mask = torch.tensor([[False, True, False, False]])
    before = encoder.tokens(clips, mask)
    clips[0, 8:16] = 100.0
    torch.testing.assert_close(encoder.tokens(clips, mask), before)
    clips[0, 0] = 100.0
    assert not torch.allclose(encoder.tokens(clips, mask), before)


def test_patches_are_told_apart_by_their_place(encoder: ClipEncoder) -> None:
    clip = torch.randn(1, 32)
    swapped = torch.cat([clip[:, 16:], clip[:, :16]], dim=1)
    assert not torch.allclose(encoder(clip), encoder(swapped), atol=1e-4)


def test_an_encoder_comes_back_from_its_file_as_it_was(
    tmp_path: Path, encoder: ClipEncoder
) -> None:
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, encoder, {"run_id": "pretrain.0001.0000"})
    loaded, meta = load_encoder(path)
    clips = torch.randn(3, 32)
    assert torch.equal(loaded.eval()(clips), encoder(clips))
    assert (loaded.config, meta) == (SMALL, {"run_id": "pretrain.0001.0000"})
    first = path.read_bytes()
    save_encoder(path, encoder, {"run_id": "pretrain.0001.0000"})
    assert path.read_bytes() == first


def test_a_damaged_encoder_file_is_refused(tmp_path: Path, encoder: ClipEncoder) -> None:
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, encoder, {})
    data = path.read_bytes()
    for damaged in (
        data[:-10],
        data[:5],
        b"",
        b"PAR1" + data,
        data.replace(b"clip-enc", b"xxxx-xxx"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"read the encoder: .*encoder\.safetensors: "):
            load_encoder(path)
    with pytest.raises(DataError, match="No such file"):
        load_encoder(tmp_path / "none")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"patch": 7}, "patch 7 does not divide length 128"),
        ({"heads": 5}, "heads 5 does not divide width 64"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
    ],
)
def test_an_impossible_shape_is_refused(fields: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        EncoderConfig(**fields)
