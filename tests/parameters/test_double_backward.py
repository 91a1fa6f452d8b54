"""Gradients of gradients with respect to parameters that move: backward saves the restored parameters again."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import offload
from offload.parameters.saved_parameter import SavedView
from offload.torch_compat.overrides import version_of_object


class Product(nn.Module):
    """Its parameter is as it was created (version 0); those of torch's layers have been written once (version 1)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x):
        return x @ self.weight


def make():
    torch.manual_seed(0)
    return nn.Sequential(Product(), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(), Product())


def penalty(model, x):
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def train(model):
    """The gradients of three steps, each after an update of the parameters."""
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        penalty(model, torch.randn(10, 48, generator=made)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return found


def enabled(model, folder):
    return offload.enable(model, n_tensors=-1, min_tensor_bytes=1024, parameters="all", spill_dir=folder)


def test_a_penalty_on_gradients(tmp_path):
    model = make()
    expected = train(deepcopy(model))
    with enabled(model, tmp_path):
        found = train(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_the_version_is_the_parameters(tmp_path, monkeypatch):
    """A restored tensor has another counter: without the guard, torch's error is raised though nothing has changed."""
    init = SavedView.__init__

    def with_the_tensors(self, tensor, parameter, record):
        init(self, tensor, parameter, record)
        self._saved_version = version_of_object(tensor)

    monkeypatch.setattr(SavedView, "__init__", with_the_tensors)
    model = make()
    with enabled(model, tmp_path), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(model)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_parameter_that_is_changed_between_both_backward_passes(is_enabled, tmp_path):
    model = make()
    if is_enabled:
        enabled(model, tmp_path)
    found = penalty(model, torch.ones(10, 48))
    with torch.no_grad():
        model[4].weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()
