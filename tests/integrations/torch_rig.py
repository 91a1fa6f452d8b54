"""What the tests of torch's own switches share: a small model of blocks, steps from a seed, and equality to the bit."""

import torch
from torch import nn
from torch.nn import functional

KNOBS = {"n_tensors": -1, "lb": 2, "min_tensor_bytes": 1}


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))).sin())


class Blocks(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_blocks():
    torch.manual_seed(0)
    return Blocks()


def replace_blocks(blocks, **how):
    """Put what torch.compile makes of each block in its place."""
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, **how)


def batch(number, rows=16):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))


def train(call, model, steps=3, start=0):
    """Loss and gradients of every step, from batch `start` on; the parameters move between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number in range(start, start + steps):
        loss = call(batch(number)).square().mean()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same(found, expected):
    """Every tensor of every step, to the last bit."""
    assert len(found) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours) == len(theirs)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"step {step}, tensor {number}"
