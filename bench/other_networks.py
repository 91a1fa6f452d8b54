"""Networks that no test of the engine trains: they show whether what it promises holds for steps it was not tuned on.

Random weights; each has `blocks`, as the networks of models.py do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Size = dict[str, int]


class NormedBlock(nn.Module):
    """A residual block: group normalization, SiLU and a 3 × 3 convolution, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, y, x) → the same."""
        hidden = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(functional.silu(norm(hidden)))
        return x + hidden


class ResidualNet(nn.Module):
    """A stem and blocks of one resolution."""

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size["width"], 4, 4)
        self.blocks = nn.ModuleList(NormedBlock(size["width"]) for _ in range(size["layers"]))
        self.head = nn.Linear(size["width"], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, resolution, resolution) → logits."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


class MixerBlock(nn.Module):
    """Two perceptrons with a residual path each: over positions, then over channels."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.over_positions = nn.Sequential(nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        x = x + self.over_positions(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """An MLP-Mixer over image patches."""

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        patch, length = size["patch"], (size["resolution"] // size["patch"]) ** 2
        self.patches = nn.Conv2d(3, size["width"], patch, patch)
        self.blocks = nn.ModuleList(MixerBlock(size["width"], length) for _ in range(size["layers"]))
        self.head = nn.Linear(size["width"], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, resolution, resolution) → logits."""
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Transformer encoder layers with normalization behind each part and dropout, over bytes."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        width = size["width"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(size["length"], width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, size["heads"], 4 * width, 0.1, "gelu", batch_first=True)
            for _ in range(size["layers"])
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Int64 (batch, length) → logits (…, vocabulary)."""
        hidden = self.embedding(x) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class GatedLayer(nn.Module):
    """A GRU layer with a residual path; only its sequence goes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        return x + self.gru(x)[0]  # type: ignore[no-any-return]


class ByteGRU(nn.Module):
    """Layers of GRUs over bytes."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size["width"])
        self.blocks = nn.ModuleList(GatedLayer(size["width"]) for _ in range(size["layers"]))
        self.head = nn.Linear(size["width"], vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Int64 (batch, length) → logits (…, vocabulary)."""
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class DilatedBlock(nn.Module):
    """A gated, dilated convolution over a sequence, with a residual path."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.gates = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, length) → the same."""
        value, gate = self.gates(x).chunk(2, 1)
        return x + self.mix(torch.tanh(value) * torch.sigmoid(gate))  # type: ignore[no-any-return]


class DilatedNet(nn.Module):
    """Blocks of growing dilation over bytes."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size["width"])
        self.blocks = nn.ModuleList(DilatedBlock(size["width"], 1 << layer % 6) for layer in range(size["layers"]))
        self.head = nn.Linear(size["width"], vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Int64 (batch, length) → logits (…, vocabulary)."""
        hidden = self.embedding(x).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.transpose(1, 2))  # type: ignore[no-any-return]
