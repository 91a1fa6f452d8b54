"""Optimizer state on the simulated accelerator, in pinned memory between steps: the same bits, and no finding."""

import copy

import pytest
import torch
from torch import nn
from twin import sim

import offload
from offload.optimizer_state import mover

STEPS = 5
OPTIONS = [{"n_tensors": 0}, {"n_tensors": -1}, {"n_tensors": 0, "host_limit": "64KiB"}]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Several chunks, read ahead and written behind."""
    monkeypatch.setattr(mover, "CHUNK_BYTES", 32 << 10)
    monkeypatch.setattr(mover, "AHEAD_BYTES", 64 << 10)
    monkeypatch.setattr(mover, "BEHIND_BYTES", 32 << 10)


def train(options):
    """Weights, the state_dict of the third step and that of the last; the handle."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU()))).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    handle = None
    if options is not None:
        handle = offload.enable(model, optimizer=optimizer, optimizer_state=True, min_tensor_bytes=1024, **options)
    saved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn((32, 64), generator=torch.Generator().manual_seed(step)).to("sim")
        model(x).square().mean().backward()
        optimizer.step()
        if step in (2, STEPS - 1):
            saved.append(copy.deepcopy(optimizer.state_dict()["state"]))
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    return [
        *found,
        *(value.cpu() for state in saved for _, each in sorted(state.items()) for value in each.values()),
    ], handle


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", [*OPTIONS, *({**each, "step_in_backward": True} for each in OPTIONS)])
def test_state_in_pinned_memory(options, seed):
    sim.schedule(seed, 500)
    expected, _ = train(None)
    found, handle = train(options)
    assert all(map(torch.equal, found, expected))
    [counts] = handle.report().optimizer_state
    assert counts.in_bytes > 0
    assert (counts.failed > 0) == ("host_limit" in options)
    handle.disable()
