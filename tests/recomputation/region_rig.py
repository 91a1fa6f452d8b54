"""What tests of compiled parts share: blocks that are compiled, trained plain and under a limit."""

import copy
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.plan import Link, least_feasible_limit, unswapped_bytes

WIDTH = 32
BLOCKS = 3
SLOW = Link(2e4, 2e4)  # swapping takes a minute: no pause of the machine makes recomputation as slow


@pytest.fixture(autouse=True)
def rig(monkeypatch):
    """Plans are made for a link so slow that recomputation pays, whatever this machine's disk does."""
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: SLOW)
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, link: link)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block with dropout. `change` is called in its forward."""

    def __init__(self, change=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.change = change

    def forward(self, x):
        if self.change is not None:
            self.change(self, x)
        inner = functional.dropout(functional.gelu(self.widen(self.norm(x))), 0.1, self.training)
        return x + self.narrow(inner)


def make(change=None, style="in place", backend="aot_eager"):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(change) for _ in range(BLOCKS)], nn.Linear(WIDTH, 4))
    for number in range(BLOCKS):
        if style == "in place":
            model[number].compile(backend=backend)
        else:
            model[number] = torch.compile(model[number], backend=backend)
    return model


def batch(number):
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(number))


def step(model, number, between=lambda model: None, **how):
    """Loss, gradients, buffers and the random state of one step."""
    torch.manual_seed(number)
    model.zero_grad()
    loss = model(batch(number)).square().mean()
    between(model)
    loss.backward(**how)
    if how.get("retain_graph"):
        loss.backward()
    held = [*(parameter.grad.clone() for parameter in model.parameters()), *map(torch.clone, model.buffers())]
    return [loss.detach(), *held, torch.get_rng_state()]


def train(model, steps=4, **how):
    return [each for number in range(steps) for each in step(model, number, **how)]


@contextmanager
def enabled(model, spill_dir, share=0.35, probe=train, **options):
    """The model under a limit some way above the least, where swapping alone makes the step wait."""
    options = {"min_tensor_bytes": 4096, "spill_dir": spill_dir, **options}
    with offload.enable(model, max_slowdown=1e9, **options) as handle:
        own = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
        state = {name: each.clone() for name, each in model.named_buffers()}
        calls = [getattr(part, "calls", None) for part in model.modules()]
        probe(model, 1)
        trace = handle.trace()
        for parameter, before in zip(model.parameters(), own, strict=True):
            parameter.grad = None
            assert torch.equal(parameter, before)
        for name, each in model.named_buffers():
            each.copy_(state[name])
        for part, count in zip(model.modules(), calls, strict=True):
            if count is not None and isinstance(part, Block):
                part.calls = count
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    limit = int(least + share * (peak - least))
    with offload.enable(model, memory_limit=limit, **options) as handle:
        yield handle


def check(spill_dir, change=None, refused="", share=0.35, **how):
    """Train plain and enabled; the bits are the same, and regions are chosen, or refused for the reason given."""
    expected = train(make(change), **how)
    torch._dynamo.reset()
    model = make(change)
    with enabled(model, spill_dir, share, partial(train, **how)) as handle:
        found = train(model, **how)
        about = handle._controller.regions
        assert bool(about.chosen) == (not refused)
        if refused:
            assert about.refusals
            assert all(refused in why for why in about.refusals.values())
            assert refused in " ".join(handle.report().notes)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Calling(nn.Module):
    """Compiled blocks that `call` calls, in order."""

    def __init__(self, kind, call):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[kind() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 4)
        self.call = call
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def check_calls(spill_dir, kind, call, refused=""):
    expected = train(Calling(kind, call))
    torch._dynamo.reset()
    model = Calling(kind, call)
    with enabled(model, spill_dir) as handle:
        found = train(model)
        assert bool(handle._controller.regions.chosen) == (not refused)
        assert all(refused in why for why in handle._controller.regions.refusals.values())
    assert all(map(torch.equal, found, expected))
