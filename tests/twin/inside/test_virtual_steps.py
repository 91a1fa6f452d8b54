"""Planned steps in virtual time, where nothing disturbs: what is measured is what the profile and the plan say."""

import pytest
import torch
from torch import nn
from twin import sim, virtual_time
from twin.virtual_time import Figures

import offload
from offload.profiling import link_measurement

# A link so slow that steps wait for it, and a host that takes no time.
SLOW_LINK = Figures(1e12, 1e11, out_bytes_per_second=1e9, in_bytes_per_second=1e9, kernel_seconds=2e-6)


@pytest.fixture(autouse=True)
def own_link(monkeypatch, tmp_path):
    """A measured link is kept by the device's name: this one is nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sim.module, "get_device_name", lambda device=None: f"in virtual time, {tmp_path.name}")
    monkeypatch.setattr(link_measurement, "ROUND_SECONDS", 0.01)
    torch.sim.synchronize()
    sim.schedule(0, 0)


def chain():
    """ReLU saves its result, and so does the layer behind it: backward asks for the second view first."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(128, 128), nn.ReLU()))).to("sim")


def growth_bytes(model, x):
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    model(x).square().mean().backward()
    model.zero_grad()
    return before, torch.sim.max_memory_allocated() - before


def test_a_wait_for_a_second_view_is_none_of_its_nodes_computation():
    model, x = chain(), torch.randn(2048, 128).to("sim")
    before, growth = growth_bytes(model, x)
    with virtual_time.on(SLOW_LINK):
        limit = before + int(0.7 * growth)
        with offload.enable(model, memory_limit=limit, min_tensor_bytes=1 << 16, recompute=False) as handle:
            computed, waited = [], []
            for _ in range(7):  # profiled, three judged, and what follows on what they measured
                model(x).square().mean().backward()
                model.zero_grad()
                torch.sim.synchronize()
                if handle.plan is not None:
                    computed.append(handle.plan.compute_seconds)
                    waited.append(handle.plan.step_seconds - handle.plan.compute_seconds)
        assert min(waited) > 0.1 * computed[0]  # else there would be nothing to take for computation
        assert computed == [pytest.approx(computed[0], rel=0.01)] * len(computed)


def test_a_small_block_leaves_before_later_ones_are_produced():
    """The host queues the whole forward pass at once; the link is several times as fast as what it copies is made."""
    model, x = chain(), torch.randn(1024, 128).to("sim")  # blocks of 512 KiB
    bandwidth = 5e10
    card = Figures(1e12, 1e11, out_bytes_per_second=bandwidth, in_bytes_per_second=bandwidth, kernel_seconds=2e-6)
    with virtual_time.on(card), offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1 << 16):
        for _ in range(2):
            torch.sim.synchronize()
            virtual_time.take_work()
            loss = model(x).square().mean()
            torch.sim.synchronize()
            kernels, outs, _ = virtual_time.take_work()
            loss.backward()
    produced = sorted(end for _, end in kernels)[2 * 6 - 1]  # by the last ReLU
    assert len(outs) >= 6
    assert max(end for _, end in outs) < produced + 2.5 * (1 << 19) / bandwidth
