"""`memory_limit` holds on an accelerator: the allocator's peak in planned steps of each kind of model."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import offload

PLANNED_STEPS = 3


@pytest.fixture
def families(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "bench"))
    from models import FAMILIES, batch_of, build, loss_of

    return FAMILIES, batch_of, build, loss_of


@pytest.mark.parametrize(
    "room", [0.0, pytest.param(0.3, marks=pytest.mark.full), 0.6, pytest.param(0.9, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", ["gpt", "lstm", "resnet", "unet", "vit"])
def test_the_peak_of_a_planned_step(name, room, families):
    known, batch_of, build, loss_of = families
    size = known[name].tiny
    model = build(name, size, seed=0, device="sim", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(number):
        x, y = batch_of(name, size, seed=0, step=number, device="sim", dtype=torch.float32)
        with sdpa_kernel(SDPBackend.MATH):
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.sim.synchronize()

    with offload.enable(model, max_slowdown=100.0, min_tensor_bytes=4096) as handle:
        for number in range(2):
            step(number)
        trace = handle.trace()
    least = offload.plan.least_feasible_limit(trace)
    limit = int(least + room * (max(offload.plan.unswapped_bytes(trace)) - least))
    optimizer.zero_grad()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=4096) as handle:
        for number in range(2):
            step(number)
        assert handle.plan.swaps
        peaks = []
        for number in range(PLANNED_STEPS):
            torch.sim.reset_peak_memory_stats()
            step(number)
            peaks.append(torch.sim.memory_stats()["allocated_bytes.all.peak"])
    print(f"{name} {room}: {max(peaks)} of {limit}: {max(peaks) / limit - 1:+.2%}; swaps {len(handle.plan.swaps)}")
    assert max(peaks) <= limit
