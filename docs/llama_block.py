"""Prints the plan of the page on recomputation: what one block of a Llama keeps, swaps and recomputes, and why.

    OFFLOAD_THROTTLE=0.05GB/s python docs/llama_block.py

Its figures are those of this machine.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import offload
from offload.plan import least_feasible_limit, unswapped_bytes

WIDTH, HEADS, HIDDEN, BLOCKS, BATCH, LENGTH = 256, 4, 688, 4, 4, 512
ROOM = 0.15  # of the way from the least feasible limit to the unswapped peak
STEPS = 8


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, features)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000 ** (-torch.arange(half) / half))
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class Attention(nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMS norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def main() -> None:
    """Train a few steps and print the plan of the second block."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def step() -> None:
        x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        model(x).square().mean().backward()
        model.zero_grad()

    with offload.enable(model, max_slowdown=0, recompute=False) as handle:
        step()
        step()
        trace = handle.trace()
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    with offload.enable(model, memory_limit=int(least + ROOM * (peak - least))) as handle:
        for _ in range(STEPS):
            step()
        lines = handle.plan.explain().splitlines()
    # The lines on the whole step, then those of the tensors of block 1.
    print("\n".join(line for line in lines if line.startswith("1.") or "(tensor " not in line))


if __name__ == "__main__":
    main()
