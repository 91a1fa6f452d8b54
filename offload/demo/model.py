"""The model that `offload demo` trains: a small GPT over bytes, in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of a training run: those of the model; sequences per batch, and bytes per sequence."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values are three views of one projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.project_in = nn.Linear(shape.width, 3 * shape.width)
        self.project_out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention to (batch, length, width); the result has the same shape."""
        batch, length, width = x.shape
        parts = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a GELU MLP of four times the width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP to (batch, length, width); the result has the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ByteGPT(nn.Module):
    """A GPT over bytes; with `checkpointed`, every block recomputes its forward in backward.

    Parameters
    ----------
    shape : Shape
        `width` must be a multiple of `heads`.
    checkpointed : bool
        Wrap every block in `torch.utils.checkpoint` (non-reentrant).
    """

    def __init__(self, shape: Shape, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.byte_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrowing = name.endswith(("project_out.weight", "mlp.2.weight"))
                scale = 0.02 / math.sqrt(2 * shape.layers) if narrowing else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next byte at every position: int64 (batch, length) → logits (…, 256)."""
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.byte_embedding(x) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]
