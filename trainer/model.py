"""The clip encoder: a small patch transformer, and its file.

A clip of T values is cut into N = T / P patches, each embedded linearly, given a learned position
and passed through pre-norm transformer blocks: PatchTST for one channel (Nie et al. 2023,
arXiv 2211.14730) without overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from protocol.errors import DataError, UsageError
from protocol.schema import decode
from trainer.weights import load_weights, save_weights

FORMAT = "clip-encoder"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The encoder's shape."""

    length: int = 128
    """T, the values in a clip."""

    patch: int = 8
    """P, the values in a patch; it divides T."""

    width: int = 64
    """D, the size of a token and of an embedding."""

    depth: int = 3
    """Transformer blocks."""

    heads: int = 4
    """Attention heads; they divide the width."""

    expansion: int = 2
    """The feed-forward layer's width, in widths."""

    def __post_init__(self) -> None:
        what = "configure the encoder"
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                why = f"{field.name} is {getattr(self, field.name)}; it must be at least 1"
                raise UsageError(what, why=why)
        if self.length % self.patch:
            why = f"patch {self.patch} does not divide length {self.length}"
            raise UsageError(what, why=why, hint="Choose a divisor, such as 4, 8 or 16.")
        if self.width % self.heads:
            why = f"heads {self.heads} does not divide width {self.width}"
            raise UsageError(what, why=why, hint="Choose a divisor, such as 2 or 4.")

    @property
    def patches(self) -> int:
        """N, the number of patches of a clip."""
        return self.length // self.patch


class Block(nn.Module):
    """Pre-norm transformer block over tokens (B, N, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.width * config.expansion
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden

    def attend(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        qkv = self.qkv(x).reshape(batch, count, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, count, width))
        return out


class ClipEncoder(nn.Module):
    """Clips (B, T) float32 to embeddings (B, D), or to tokens (B, N, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.patch, config.width)
        self.position = nn.Parameter(torch.randn(config.patches, config.width) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def patchify(self, x: Tensor) -> Tensor:
        """Cut clips (B, T) into patches (B, N, P)."""
        return x.reshape(x.shape[0], self.config.patches, self.config.patch)

    def tokens(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return tokens (B, N, D); where `mask` (B, N) is true, the patch is hidden."""
        hidden: Tensor = self.embed(self.patchify(x))
        if mask is not None:
            hidden = torch.where(mask.unsqueeze(-1), self.mask_token, hidden)
        hidden = hidden + self.position
        for block in self.blocks:
            hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def features(self, x: Tensor) -> Tensor:
        """Return embeddings (B, D): the mean of the tokens."""
        return self.tokens(x).mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def save_encoder(path: Path, encoder: ClipEncoder, meta: Mapping[str, Any]) -> None:
    """Publish the weights as safetensors; configuration and `meta` (JSON) go into its header.

    The same encoder and `meta` give the same bytes.
    """
    header = {"config": dataclasses.asdict(encoder.config), "meta": dict(meta)}
    save_weights(path, encoder, header, kind=FORMAT, version=VERSION)


def load_encoder(path: Path) -> tuple[ClipEncoder, dict[str, Any]]:
    """Read an encoder that `save_encoder` wrote, on the CPU, with its `meta`.

    Raises DataError when the file is missing, cut short, or is no encoder of this version.
    """
    try:
        header, tensors = load_weights(path, kind=FORMAT, version=VERSION)
        encoder = ClipEncoder(decode(EncoderConfig, header["config"]))
        encoder.load_state_dict(tensors)
        meta = dict(header["meta"])
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            "read the encoder",
            path=path,
            why=str(error).splitlines()[0],
            hint="Run `trainer pretrain` again, or fetch the file again.",
        ) from error
    return encoder, meta
