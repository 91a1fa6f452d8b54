"""Plans on an accelerator: the limit holds for what torch's allocator hands out, and the bits are the same."""

import gc
from dataclasses import replace

import pytest
import torch
from accelerator import KIND, gpu, is_available, is_simulated
from gpu_rig import LONG_IF_SIMULATED
from torch import nn

import offload
from offload import _core
from offload.control.limits import LIMITS
from offload.control.promise import SlowdownPromise
from offload.control.step_cost import StepCost
from offload.plan import InfeasibleLimitError

pytestmark = pytest.mark.gpu

MIB = 1 << 20
STEPS = 6 if is_simulated else 8
WIDTH, ROWS = (64, 2048) if is_simulated else (1024, 4096)  # a processor computes what runs on the simulated one


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Skip without a device; else compute the same bits every time."""
    if not is_available():
        pytest.skip("no accelerator")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gpu.empty_cache()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(knobs, steps=STEPS, *, ends_on_cpu=False):
    """Losses, gradients of every step, and the allocator's peak from the third step on; the handle."""
    gc.collect()  # what earlier tests have left would be in the peak of one training and not of the next
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH) for _ in range(8)]).to(KIND)
    optimizer = torch.optim.Adam(model.parameters())
    handle = offload.enable(model, **knobs) if knobs else None
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(steps):
        if step == 2:
            gpu.synchronize()
            gpu.reset_peak_memory_stats()
        x = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=ends_on_cpu).to(KIND)
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone().cpu() for parameter in model.parameters())]
        del loss, x
        optimizer.step()
        optimizer.zero_grad()
    gpu.synchronize()
    peak = gpu.max_memory_allocated()
    if handle is not None:
        handle.disable()
    return results, peak, handle


@pytest.mark.parametrize("fraction", [pytest.param(0.8, marks=LONG_IF_SIMULATED), 0.6])
def test_memory_limit_is_kept(fraction):
    expected, plain_peak, _ = train({})
    limit = int(fraction * plain_peak)
    try:
        results, peak, handle = train({"memory_limit": limit})
    except InfeasibleLimitError as error:
        results, peak, handle = train({"memory_limit": (limit := error.least_limit_bytes)})
    assert all(map(torch.equal, results, expected))
    assert handle.plan.peak_bytes <= limit
    assert peak <= limit + MIB, "rounding of the allocator's blocks"
    assert handle.report().swapped.tensors > 0


def test_default_is_planned_and_bit_equal():
    expected, plain_peak, _ = train({})
    results, peak, handle = train({"max_slowdown": 0.05})
    assert all(map(torch.equal, results, expected))
    assert peak <= plain_peak + MIB  # reference steps keep every tensor
    assert len(handle.trace().tensors) > 0
    verdict = handle.report().verdict
    assert verdict.step_seconds_planned > 0
    assert verdict.step_seconds > 0


def test_the_slowdown_is_measured_beside_reference_steps(monkeypatch):
    costs = []
    of = StepCost.of
    monkeypatch.setattr(StepCost, "of", lambda measured: costs.append(of(measured)) or costs[-1])
    expected, _, _ = train({}, 14, ends_on_cpu=True)
    results, _, handle = train({"max_slowdown": 1.0, "min_tensor_bytes": "64KiB"}, 14, ends_on_cpu=True)
    assert all(map(torch.equal, results, expected))
    assert handle.report().reference_steps >= 3
    assert len(costs) >= 6
    # The CPU time of the thread in which backward ends says nothing of an accelerator's step.
    assert all(cost.own_step == cost.step > 0 for cost in costs)


def test_pinned_memory_that_only_the_search_needed_is_returned(monkeypatch):
    make = _core.SwapStore.slab
    monkeypatch.setattr(_core.SwapStore, "slab", lambda *args, **named: make(*args, **{**named, "slab_bytes": MIB}))
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, spare_pinned_bytes=0, replans=0))
    held = []
    release = SlowdownPromise.release_pinned

    def noted(self):
        held.append(self._engine.store.stats()["pool_held_bytes"])
        release(self)
        held.append(self._engine.store.stats()["pool_held_bytes"])

    monkeypatch.setattr(SlowdownPromise, "release_pinned", noted)
    expected, plain_peak, _ = train({}, 12)
    results, _, handle = train({"memory_limit": int(0.9 * plain_peak), "min_tensor_bytes": "64KiB"}, 12)
    assert all(map(torch.equal, results, expected))
    before, after = held[:2]
    assert after < before
    assert held[-1] < before
    assert handle.report().to_dict()["host_bytes_held"] < before
