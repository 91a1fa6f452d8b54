"""Training with all parameters in the store between uses, to be compared with plain training bit by bit."""

import torch
from parameters.frozen_rig import STEPS, WIDTH, Attends, Model, assert_equal, enable, loss_of, make_model
from torch import nn

import offload

# How optimizers step: each parameter in backward, in chunks, or as they do without offload.
WAYS = {
    "in backward": {"step_in_backward": True},
    "in backward, state": {"step_in_backward": True, "optimizer_state": True},
    "chunks": {"optimizer_state": True},
    "alone": {},
}


class Pictures(nn.Module):
    """Convolutions whose weights have their channels last, and a parameter that is transposed in memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 4, 3, padding=1))
        self.layers.to(memory_format=torch.channels_last)
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 10)

    def forward(self, x):
        return self.layers((x @ self.mixed).view(-1, 4, 4, 2).to(memory_format=torch.channels_last)).flatten(1)


class Clipped(nn.Module):
    """A layer that writes to its weight behind the version in each forward, as constrained layers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x) + nn.functional.linear(x, self.layer.weight.t())


class Looks(nn.Module):
    """A layer that reads its parameter before the operator that saves it."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = self.mixed.detach().abs().mean()
        return self.layer(x) @ self.mixed * size


KINDS = {"tied": Model, "attends": Attends, "pictures": Pictures, "clipped": Clipped, "looks": Looks}


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


class Run:
    """One training run of a model, all of whose parameters are trained."""

    def __init__(self, folder=None, way="in backward", kind=Model, make=adamw, **knobs):
        self.model = make_model(kind).requires_grad_(True)
        self.optimizer = make(self.model.parameters())
        self.gradients = []
        for parameter in self.model.parameters():
            parameter.register_hook(self.gradients.append)
        self.handle = None
        if folder is not None:
            given = {"parameters": "all", "optimizer": self.optimizer, **WAYS[way], **knobs}
            self.handle = enable(self.model, folder, **given)

    def train(self, steps=STEPS, begin=0, loss=loss_of, between=None):
        """Losses and gradients of all steps."""
        found = []
        torch.manual_seed(begin)
        for number in range(begin, begin + steps):
            self.optimizer.zero_grad()
            value = loss(self.model, number)
            value.backward()
            self.optimizer.step()
            found += [value.detach(), *(each.detach().clone() for each in self.gradients)]
            self.gradients.clear()
            if between is not None:
                between(self.model)
        return found

    def everything(self):
        """Weights and states."""
        weights = [each.detach().clone() for each in self.model.state_dict().values()]
        states = sorted(self.optimizer.state_dict()["state"].items())
        return weights + [value for _, state in states for value in state.values() if isinstance(value, torch.Tensor)]


def assert_same(moved, plain):
    assert_equal(moved.everything(), plain.everything())


def engine_of(run):
    return run.handle._enabled.parameters.engine


def assert_bits(folder, steps=STEPS, between=None, loss=loss_of, **given):
    """Train both ways, disable, and train on. Returns the moved run."""
    moved, plain = Run(folder, **given), Run(**{name: given[name] for name in given.keys() & {"kind", "make"}})
    assert_equal(moved.train(steps, 0, loss, between), plain.train(steps, 0, loss, between))
    counts = moved.handle.report().moved_parameters
    assert (counts.held, counts.failed) == (0, 0)
    assert counts.trained > 0
    assert counts.rewritten >= (steps - 1) * counts.trained
    assert_same(moved, plain)
    moved.handle.disable()
    assert {type(each) for each in moved.model.parameters()} == {nn.Parameter}
    assert_same(moved, plain)
    assert_equal(moved.train(2, steps), plain.train(2, steps))
    return moved


def session_without_optimizer(model, folder):
    return offload.enable(model, n_tensors=0, min_tensor_bytes=256, spill_dir=folder, parameters="all")
