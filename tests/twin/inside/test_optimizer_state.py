"""Optimizer state on the simulated accelerator, in pinned memory between steps: the same bits, and no finding."""

import copy
import gc

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
@pytest.mark.parametrize(
    "options", [{**each, **more} for more in ({}, {"step_in_backward": True}, {"gradients": True}) for each in OPTIONS]
)
def test_state_in_pinned_memory(options, seed):
    sim.schedule(seed, 500)
    expected, _ = train(None)
    found, handle = train(options)
    assert all(map(torch.equal, found, expected))
    report = handle.report()
    [counts] = report.optimizer_state
    if "gradients" in options:
        assert report.gradients[0].in_bytes > 0
    else:
        assert counts.in_bytes > 0
    assert (counts.failed > 0) == ("host_limit" in options)
    handle.disable()


def planned(limit):
    """Weights and state after training on a plan within a limit, the peaks of planned steps, and the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(64, 64), nn.GELU()))).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    knobs = {"memory_limit": limit, "min_tensor_bytes": 1024, "recompute": False}
    handle = offload.enable(model, **knobs) if limit else None
    peaks = []
    try:
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            x = torch.randn((64, 64), generator=torch.Generator().manual_seed(step)).to("sim")
            if step > 2:
                torch.sim.synchronize()
                torch.sim.reset_peak_memory_stats()
            model(x).square().mean().backward()
            peaks.append(torch.sim.memory_stats()["allocated_bytes.all.peak"])
            optimizer.step()
        plan = handle.plan if handle is not None else None
    finally:
        if handle is not None:
            handle.disable()
    state = [value.cpu() for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return [*(parameter.detach().cpu() for parameter in model.parameters()), *state], max(peaks[3:]), plan


@pytest.mark.parametrize("room", [0.0, *(pytest.param(room, marks=pytest.mark.full) for room in (0.25, 0.5, 0.8))])
def test_state_that_a_plan_moves(room):
    expected, plain_peak, _ = planned(None)
    with pytest.raises(offload.InfeasibleLimitError) as refused:
        planned(64 << 10)
    least = refused.value.least_limit_bytes
    del refused  # its frames hold the model
    gc.collect()
    limit = int(least + room * (plain_peak - least))
    found, peak, plan = planned(limit)
    assert all(map(torch.equal, found, expected))
    assert plan.state.moved or room
    assert plan.peak_bytes <= limit
    assert peak <= limit


@pytest.mark.parametrize("asked", [True, "auto"])
@pytest.mark.parametrize("seed", range(4))
def test_state_that_exists_before_enable(asked, seed, monkeypatch):
    """It leaves in the hook before the step that needs it: as after a checkpoint was loaded."""
    for name in ("CHUNK_BYTES", "AHEAD_BYTES", "BEHIND_BYTES"):
        monkeypatch.setattr(mover, name, 1 << 20)  # no copy-out is waited for
    sim.schedule(seed, 500)

    def run(knobs):
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(64, 64), nn.GELU()))).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        handle = None
        for step in range(3):
            if step == 1 and knobs is not None:
                given = {"optimizer": optimizer, "optimizer_state": asked, "min_tensor_bytes": 1024, **knobs}
                handle = offload.enable(model, **given)
            optimizer.zero_grad()
            x = torch.randn((64, 64), generator=torch.Generator().manual_seed(step)).to("sim")
            model(x).square().mean().backward()
            optimizer.step()
        if handle is not None:
            handle.disable()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    knobs = {"n_tensors": 0} if asked is True else {"memory_limit": "1MiB", "recompute": False}
    assert all(map(torch.equal, run(knobs), run(None)))


def test_a_checkpoint_in_host_memory_never_is_all_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16))).to("sim")
    plain, moved = (torch.optim.AdamW(model.parameters(), foreach=False) for _ in range(2))
    model(torch.ones((4, 128)).to("sim")).square().mean().backward()
    plain.step()
    expected = [value.cpu() for each in plain.state_dict()["state"].values() for value in each.values()]
    checkpoint = plain.state_dict()
    checkpoint["state"] = {
        number: {name: value.cpu() for name, value in each.items()} for number, each in checkpoint["state"].items()
    }
    del plain
    gc.collect()
    knobs = {"n_tensors": 0, "min_tensor_bytes": 1024, "optimizer_state": True}
    with offload.enable(model, optimizer=moved, **knobs) as handle:
        torch.sim.synchronize()
        before = torch.sim.memory_stats()["allocated_bytes.all.current"]
        torch.sim.reset_peak_memory_stats()
        moved.load_state_dict(checkpoint)
        of_one = 2 * (64 << 10)
        peak = torch.sim.memory_stats()["allocated_bytes.all.peak"] - before
        assert of_one <= peak <= mover.BEHIND_BYTES + 2 * of_one < 16 * of_one / 4
        assert handle.report().optimizer_state[0].out_bytes == 16 * of_one
        found = [value.cpu() for each in moved.state_dict()["state"].values() for value in each.values()]
    assert all(map(torch.equal, found, expected))
