"""What users do with optimizers, plain and with offload: the same weights, states and counts.

Each scenario is a function of `on`, which enables offload for a model and its optimizers, or does nothing.
"""

import copy

import torch
from optimizer_state.state_rig import assert_equal
from torch import nn
from torch.optim import AdamW, Optimizer

import offload


class Scenarios(list):
    """The scenarios of a test file, in order. It decorates them."""

    def __call__(self, function):
        self.append(function)
        return function


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 120), nn.GELU(), nn.Linear(120, 60), nn.LayerNorm(60), nn.Linear(60, 10))


def loss_of(model, number):
    return model(torch.randn(16, 60, generator=torch.Generator().manual_seed(number))).square().mean()


def train(model, optimizer, steps, begin=0):
    for number in range(begin, begin + steps):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def trained(on, kind=AdamW, steps=2):
    """A model and its optimizer after some steps, with offload if `on` enables it."""
    model = make_model()
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, steps)
    return model, optimizer


def everything(model, *optimizers):
    return [p.detach().clone() for p in model.parameters()], [copy.deepcopy(each.state_dict()) for each in optimizers]


class On:
    """Enables offload for what a scenario makes. `asked`: what is enabled of its optimizers."""

    def __init__(self, is_on, folder, **asked):
        self.is_on = is_on
        self.handles = []
        self.knobs = {
            "n_tensors": 0,
            "min_tensor_bytes": 1024,
            "spill_dir": folder,
            **(asked or {"optimizer_state": True}),
        }

    def __call__(self, model, *optimizers):
        if self.is_on:
            self.handles.append(offload.enable(model, optimizer=list(optimizers), **self.knobs))

    def off(self):
        while self.handles:
            self.handles.pop().disable()

    @property
    def counts(self):
        return [counts for handle in self.handles for counts in handle.report().optimizer_state]


def both(function, folder, *given, **asked):
    """What a scenario returns without and with offload, and `on` of the latter."""
    plain = function(On(False, folder), *given)
    on = On(True, folder, **asked)
    moved = function(on, *given)
    return plain, moved, on


def assert_the_same(function, folder):
    plain, moved, on = both(function, folder)
    assert_equal(moved, plain)
    on.off()


class Momentum(Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.prepare()

    def prepare(self):
        pass

    def extra(self):
        pass

    @property
    def with_gradient(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.extra()
        for parameter in self.with_gradient:
            state = self.state[parameter]
            if "m" not in state:
                state["m"] = torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["m"], alpha=self.param_groups[0]["lr"])
        return loss
