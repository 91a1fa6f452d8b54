"""Recomputation on the simulated accelerator: the same bits, also of random numbers, under delays, and no finding."""

import copy
import tempfile

import pytest
import torch
from recomputation.forced import Calls, Forcing, assert_same, gradients
from torch.nn import functional
from twin import sim


def function(h):
    return functional.silu(functional.dropout(functional.gelu(h), 0.3) * torch.sigmoid(h))


def plain_step(model, number):
    model.zero_grad()
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(32, 64, generator=generator).to("sim")).square().mean().backward()
    return gradients(model)


def on_a_side_stream(model, number):
    """Forward on one stream, backward over a graph of two."""
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    model.zero_grad()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to("sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        h = model(x)
    torch.sim.current_stream().wait_stream(side)
    (h.square().mean() + model(x).mean()).backward()
    torch.sim.synchronize()
    return gradients(model)


def retained(model, number):
    model.zero_grad()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to("sim")
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("swaps", [False, True], ids=["kept", "swapped"])
@pytest.mark.parametrize("step", [plain_step, on_a_side_stream, retained], ids=lambda each: each.__name__)
def test_as_without(step, swaps, seed):
    if seed is not None:
        sim.schedule(seed, 200)
    torch.manual_seed(0)
    plain = Calls(function).to("sim")
    dropping = copy.deepcopy(plain)
    with tempfile.TemporaryDirectory() as folder:
        handle = Forcing(folder).enable(dropping, swaps=swaps)
        for number in range(5):
            results = []
            for model in (plain, dropping):
                torch.manual_seed(number)
                found = step(model, number)
                results.append([*(each.cpu() for each in found), torch.sim.get_rng_state(), torch.get_rng_state()])
            assert_same(results[1], results[0])
        assert handle._counts.recomputed.tensors > 0, Forcing.refused(handle)
        handle.disable()
