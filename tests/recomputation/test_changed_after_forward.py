"""A program may change what forward made after forward, if backward reads it nowhere: no recipe may read it either."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import offload
from offload.profiling.recipe_trial import RecipeTrial

STEPS = 6
WIDTH = 64


def block():
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class Branches(nn.Module):
    """Returns features too, and what a branch makes of them, which the loss does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = block(), block()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        features = self.first(x)
        unused = features * self.weight  # saves the features
        return self.second(torch.tanh(features * 2)), unused, features


def train(model, changes=True):
    made = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        y, _, features = model(torch.randn(256, WIDTH, generator=made))
        if changes:
            with torch.no_grad():
                features.clamp_(0, 1)  # as for a picture of them
        y.square().mean().backward()
        found += [y.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
    return found


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setenv("OFFLOAD_THROTTLE", "20MB/s")  # so slow that plans recompute what they can
    torch.manual_seed(0)
    return Branches()


@pytest.mark.parametrize("preset", ["smallest", "balanced"])
def test_features_that_are_changed_after_forward(model, preset, tmp_path):
    expected = train(deepcopy(model))
    with offload.enable(model, preset, min_tensor_bytes=1 << 12, spill_dir=tmp_path) as handle:
        found = train(model)
        refusals = handle.plan.refusals.values()
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert "what it reads is changed in place later" in refusals


def test_features_that_stay_are_read_by_a_recipe(model, tmp_path):
    with offload.enable(model, "smallest", min_tensor_bytes=1 << 12, spill_dir=tmp_path) as handle:
        train(model, changes=False)
        assert handle.plan.recomputes
        assert "what it reads is changed in place later" not in handle.plan.refusals.values()


def test_the_change_is_seen_when_backward_needs_the_result(model, tmp_path, monkeypatch):
    """Without this guard, the first step that follows the plan fails."""
    monkeypatch.setattr(RecipeTrial, "unpacking", lambda *_: None)
    with (
        offload.enable(model, "smallest", min_tensor_bytes=1 << 12, spill_dir=tmp_path),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        train(model)
