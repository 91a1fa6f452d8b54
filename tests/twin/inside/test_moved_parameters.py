"""Parameters in pinned memory between uses, on the simulated accelerator: the same bits, and no finding."""

import gc

import pytest
import torch
from torch import nn
from twin import sim

import offload
from offload.optimizer_state import mover as state_mover
from offload.parameters import mover

STEPS = 4
WAYS = {
    "alone": {},
    "in backward": {"step_in_backward": True},
    "in backward, state": {"step_in_backward": True, "optimizer_state": True},
    "chunks": {"optimizer_state": True},
    "gradients": {"optimizer_state": True, "gradients": True},
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Several parameters are read ahead and written behind at a time, and several chunks of state."""
    for each in (mover, state_mover):
        monkeypatch.setattr(each, "AHEAD_BYTES", 40 << 10)
        monkeypatch.setattr(each, "BEHIND_BYTES", 32 << 10)
    monkeypatch.setattr(state_mover, "CHUNK_BYTES", 32 << 10)


class Net(nn.Module):
    """The first layers are frozen, two share a weight, and activations write in place."""

    def __init__(self, frozen):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)).to("sim")
        self.layers[4].weight = self.layers[1].weight
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu_(layer(x)) + x @ layer.weight
        return x


def train(frozen, **knobs):
    """Losses, gradients and weights; counts of the parameters."""
    gc.collect()
    torch.manual_seed(0)
    model = Net(frozen)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01, foreach=False)
    found, handle = [], None
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(found.append)
    if knobs:
        handle = offload.enable(model, optimizer=optimizer, min_tensor_bytes=1024, **knobs)
    for step in range(STEPS):
        x = torch.randn((32, 64), generator=torch.Generator().manual_seed(step)).to("sim")
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    counts = handle.report().moved_parameters if handle is not None else None
    weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    if handle is not None:
        handle.disable()
    return [each.cpu() for each in found] + weights + [each.detach().cpu() for each in model.parameters()], counts


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("n_tensors", [0, -1])
@pytest.mark.parametrize("way", WAYS)
def test_trained_parameters(way, n_tensors, seed):
    sim.schedule(seed, 500)
    expected, _ = train(0)
    found, counts = train(0, n_tensors=n_tensors, parameters="all", **WAYS[way])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert counts.trained == counts.tensors == 5
    assert counts.rewritten >= (STEPS - 1) * counts.trained
    assert counts.failed == 0


@pytest.mark.parametrize("parameters", ["frozen", "all"])
@pytest.mark.parametrize("n_tensors", [0, -1])
def test_frozen_parameters(n_tensors, parameters):
    sim.schedule(0, 500)
    expected, _ = train(3)
    found, counts = train(3, n_tensors=n_tensors, parameters=parameters)
    assert all(map(torch.equal, found, expected))
    assert counts.tensors == (3 if parameters == "frozen" else 5)
    assert counts.in_bytes > 0


def test_plans_count_copies_ahead_and_behind():
    model = Net(0)
    knobs = {"memory_limit": "1MiB", "parameters": "all", "min_tensor_bytes": 1024, "recompute": False}
    with offload.enable(model, **knobs) as handle:
        model(torch.ones((32, 64)).to("sim")).sum().backward()
        torch.sim.synchronize()
        held, parameters = handle._on_device.held, handle._enabled.parameters
        counted = held.look().state
        assert parameters.bytes_copied_max() == (40 + 32) << 10
        held.count_parameters(lambda _: 0, lambda _: 0)
        assert counted - held.look().state == parameters.bytes_copied_max()
