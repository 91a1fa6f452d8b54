"""What torch conjugates or negates lazily has other values than its memory, so it stays in memory."""

import pytest
import torch
from torch import nn

import offload
from offload.optimizer_state import state_tensor
from offload.parameters import moved_parameter

WIDTH = 8
CHANGES = {"conjugated": torch.conj, "negated": torch._neg_view}


class Product(nn.Module):
    """The gradient of its weight is conjugated lazily."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return (self.weight.mH @ x).abs().square().sum()


def trained(folder=None, change=lambda *_: None, after=lambda _: None, later=lambda _: None, **given):
    """Losses and gradients, then weights and state. `change` before `enable`, `after` it, and `later` after a step."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    change(model, optimizer)
    handle = None
    if folder is not None:
        given = {"optimizer": optimizer, "optimizer_state": True, **given}
        handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1, spill_dir=folder, **given)
    after(model)
    found, lazy = [], []
    for number in range(4):
        optimizer.zero_grad()
        loss = model(torch.full((WIDTH, 2), 1 + number, dtype=torch.complex64))
        loss.backward()
        loss = model(torch.full((WIDTH, 2), 2 + number, dtype=torch.complex64))
        loss.backward()
        lazy.append(model.weight.grad.is_conj())
        found += [loss.detach(), model.weight.grad.clone().resolve_conj()]
        optimizer.step()
        if number == 1:
            later(model)
    if handle is not None:
        handle.disable()
    (state,) = optimizer.state.values()
    return [*found, model.weight.detach().clone(), state["momentum_buffer"].clone()], lazy


def assert_the_same(folder, **given):
    plans = {name: given.pop(name) for name in ("change", "after", "later") if name in given}
    (plain, lazy), (moved, also_lazy) = trained(**plans), trained(folder, **plans, **given)
    assert lazy == also_lazy
    assert all(map(torch.equal, moved, plain))
    return lazy


@pytest.mark.parametrize("given", [{}, {"parameters": "all"}], ids=str)
def test_gradients(given, tmp_path):
    assert any(assert_the_same(tmp_path, gradients=True, **given))


def test_gradients_whose_data_is_replaced(tmp_path):
    def exchange(parameter):
        parameter.grad.data = parameter.grad.detach().clone().resolve_conj().conj()

    def hook(model):
        model.weight.register_post_accumulate_grad_hook(exchange)

    assert any(assert_the_same(tmp_path, gradients=True, after=hook))


@pytest.mark.parametrize("name", CHANGES)
def test_state(name, tmp_path):
    def change(model, optimizer):
        momentum = torch.randn(WIDTH, WIDTH, dtype=torch.complex64)
        optimizer.state[model.weight]["momentum_buffer"] = CHANGES[name](momentum).detach()

    assert_the_same(tmp_path, change=change)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_later", [False, True])
def test_parameters(is_later, name, tmp_path):
    def change(model, optimizer=None):
        model.weight.data = CHANGES[name](model.weight.detach().clone())

    assert_the_same(tmp_path, parameters="all", **{"later" if is_later else "change": change})


def test_without_the_guards_it_is_missed(tmp_path, monkeypatch):
    for module in (state_tensor, moved_parameter):
        monkeypatch.setattr(module, "is_read_lazily", lambda tensor: False)
    for test, given in [(test_gradients, {}), (test_state, "conjugated"), (test_state, "negated")]:
        with pytest.raises(AssertionError):
            test(given, tmp_path)
    for name in CHANGES:
        for is_later in (False, True):
            with pytest.raises(AssertionError):
                test_parameters(is_later, name, tmp_path)
