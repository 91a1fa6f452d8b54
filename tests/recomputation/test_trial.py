"""The trial: what it finds out, what it leaves alone, and how it keeps to a limit."""

import pytest
import torch
from forced import Calls, gradients
from torch import nn
from torch.nn import functional

from offload.torch_compat.modules import is_sharded


def step(model, number):
    model.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    return gradients(model)


def make():
    return Calls(lambda h: functional.silu(functional.gelu(h)))


def trial_of(handle):
    (trial,) = handle._on_device.controller.trials.values()
    return trial


def test_what_a_recipe_says(forcing):
    def long_step(model, number):  # the first layer's weight is small beside the result, so that a copy is worth it
        model.zero_grad()
        model(torch.randn(1024, 64)).square().mean().backward()
        return gradients(model)

    handle = forcing.compare(make, long_step)
    trial = trial_of(handle)
    entries = next(iter(handle._on_device.controller.known.values())).order.entries
    recipes = trial.recipes()
    assert trial.is_as_recorded
    assert recipes.keys() | trial.refusals().keys() == entries.keys()
    for index, recipe in recipes.items():
        assert recipe.seconds > 0
        assert all(source < index and source in entries for source in recipe.sources)
        assert recipe.opens < index
    names = {recipe.operators: recipe.is_heavy for recipe in recipes.values()}
    assert names == {("aten.addmm.default",): True, ("aten.gelu.default",): False, ("aten.silu.default",): False}


def test_nothing_is_tried_that_does_not_fit(forcing):
    h_bytes = 32 * 256 * 4
    limit = {"base_bytes": [0] * 100, "limit_bytes": 2 * h_bytes}
    handle = forcing.compare(make, step, limit=limit, recomputes=None)
    assert "too large to be tried within the memory limit" in forcing.refused(handle)


def test_a_trial_that_takes_another_branch_says_so(forcing):
    model = make()
    handle = forcing.enable(model)
    step(model, 0)
    model.function = torch.tanh
    step(model, 1)
    assert not trial_of(handle).is_as_recorded


def test_compiled_parts_are_left_alone(forcing):
    def compiled():
        model = make()
        model.function = torch.compile(model.function, backend="aot_eager")
        return model

    model = compiled()
    plain = make()
    plain.load_state_dict(model.state_dict())
    handle = forcing.enable(model)
    for number in range(4):
        torch.manual_seed(number)
        expected = step(plain, number)
        torch.manual_seed(number)
        assert all(map(torch.equal, step(model, number), expected))
    assert not trial_of(handle).recipes()
    assert forcing.refused(handle) == {"torch.compile made a part of the step"}


def test_sharded_parameters_are_no_sources():
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    assert is_sharded(nn.Sequential(nn.ReLU(), Sharded(2, 2)))
    assert not is_sharded(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.parametrize("swaps", [False, True], ids=["kept", "swapped"])
def test_chains_of_dropped_tensors(forcing, swaps):
    """Each is made of the one before: asked for the last, backward makes them all, and each waits for its own use."""

    def function(h):
        for _ in range(6):
            h = torch.sin(functional.gelu(h) * 2)
        return h

    handle = forcing.compare(lambda: Calls(function), step, swaps=swaps)
    steps = 4
    assert handle._counts.recomputed.tensors == steps * len(trial_of(handle).recipes())
