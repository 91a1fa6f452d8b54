"""Copies of an enabled module are plain, its state is what it was, and the original works on."""

import copy
import io
import pickle

import pytest
import torch
from test_enabled_modules import Net, gradients, train


def test_state_dict_is_unchanged(offloaded):
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offloaded.enable(model)
    assert list(model.state_dict()) == list(before)
    fresh = Net()
    assert fresh.load_state_dict(model.state_dict()).missing_keys == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
    assert model.load_state_dict(before).unexpected_keys == []


def copied(model, how):
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    return copy.deepcopy(model)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_copies_of_an_enabled_model_are_plain(offloaded, how):
    """A copy trains by itself, on its own parameters, and can be enabled itself."""
    torch.manual_seed(0)
    model = Net()
    handle = offloaded.enable(model, exclude=("second",))
    model(torch.randn(16, 64)).sum().backward()
    model.zero_grad()
    steps = handle.report().steps
    twin = copied(model, how)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    x = torch.randn(16, 64)
    loss = twin(x).square().mean()
    loss.backward()
    assert handle.report().steps == steps, "the copy's forward went through the original's session"
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = gradients(twin)
    other = offloaded.enable(twin)
    twin.zero_grad()
    twin(x).square().mean().backward()
    assert all(map(torch.equal, gradients(twin), expected))
    assert other.report().swapped.tensors > 0
    handle.disable()
    other.disable()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_original_works_on_after_it_was_copied(offloaded, how):
    def run(model, step, settle):
        results = train(model, step, settle)
        copied(model, how)
        return results + train(model, step, settle)

    assert offloaded.compare(run, make=Net).report().steps == 6
