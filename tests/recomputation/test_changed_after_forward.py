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
    """The link is so slow that plans recompute what they can; with two threads, operators would wait for busy cores."""
    monkeypatch.setenv("OFFLOAD_THROTTLE", "4MB/s")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield Branches()
    torch.set_num_threads(threads)


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


def train_in_pairs(model):
    """Two forwards, each of which changes its features, and then their backwards."""
    made = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        losses = []
        for _ in range(2):
            y, _, features = model(torch.randn(256, WIDTH, generator=made))
            losses.append((y.square().mean(), features))
        for loss, features in losses:
            with torch.no_grad():
                features.clamp_(0, 1)
            loss.backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_a_trial_is_read_after_its_backward(model, tmp_path):
    """Only backward shows what changes before it. Here the next forward comes first."""
    expected = train_in_pairs(deepcopy(model))
    with offload.enable(model, "smallest", min_tensor_bytes=1 << 12, spill_dir=tmp_path):
        found = train_in_pairs(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_who_reads_saved_tensors_before_backward_does_not_end_the_check(model, tmp_path):
    with offload.enable(model, "smallest", min_tensor_bytes=1 << 12, spill_dir=tmp_path) as handle:
        for _ in range(STEPS):
            y, _, features = model(torch.randn(256, WIDTH))
            loss = y.square().mean()
            pending = [y.grad_fn]
            while pending:  # as a debugger does, which shows the graph
                node = pending.pop()
                _ = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
                pending += [before for before, _ in node.next_functions if before is not None]
            with torch.no_grad():
                features.clamp_(0, 1)
            loss.backward()
        assert "what it reads is changed in place later" in handle.plan.refusals.values()
