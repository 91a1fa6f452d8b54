"""A small model under a plan: made, trained, watched, for a link of known bandwidth."""

import pytest
import torch
from live_bytes import Peak, tell_blocks_of_all
from torch import nn

import offload
from offload.plan import Link

LINK = Link(2e9, 2e9, 20e-6)
INPUT_BYTES_A_ROW = 32 * 4  # which were there before anybody watched; the targets are not the model's to know


@pytest.fixture(autouse=True)
def known_link(monkeypatch):
    """Plans do not depend on how busy this machine's disk is."""
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: LINK)


@pytest.fixture(autouse=True)
def told_blocks():
    undo = tell_blocks_of_all()
    yield
    undo()


class Residual(nn.Module):
    """A block whose saved tensors are of several sizes, some saved twice, some spans of one storage."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        a, b, c = self.up(self.norm(x)).chunk(3, dim=-1)
        return x + self.down(torch.tanh(a) * torch.sigmoid(b) + nn.functional.gelu(c))


def make(blocks=6, width=32):
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual(width) for _ in range(blocks)], nn.Linear(width, 4))
    return model, torch.optim.Adam(model.parameters())


def batch(rows, seed, width=32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randint(4, (rows,), generator=generator)


def train(model, optimizer, rows, first_watched=None):
    """Train a step for each number of rows: losses and gradients of all steps, and the peak of the watched ones."""
    peak = Peak()
    results = []
    for number, n in enumerate(rows):
        x, y = batch(n, number)
        watches = first_watched is not None and number >= first_watched
        if watches:
            with peak.watch():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        del loss, x, y
        optimizer.step()
        optimizer.zero_grad()
    return results, peak.nbytes + INPUT_BYTES_A_ROW * max(rows)


def held_bytes(model, optimizer):
    state = [value for row in optimizer.state.values() for value in row.values()]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *state])


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def enabled(model, **knobs):
    return offload.enable(model, **({"min_tensor_bytes": "4KiB"} | knobs))


def plain_run(rows, first_watched=2, **sizes):
    model, optimizer = make(**sizes)
    results, peak = train(model, optimizer, rows, first_watched)
    return results, peak + held_bytes(model, optimizer)
