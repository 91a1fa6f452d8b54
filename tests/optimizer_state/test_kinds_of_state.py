"""Kinds of parameters, gradients and modes, plain and with the state moved."""

import pytest
import torch
from optimizer_state.users_rig import (
    Momentum,
    Scenarios,
    assert_the_same,
    everything,
    loss_of,
    make_model,
    train,
    trained,
)
from torch import nn
from torch.optim import AdamW, Optimizer

scenario = Scenarios()


@scenario
def read_and_saved_in_inference_mode(on):
    model, optimizer = trained(on)
    with torch.inference_mode():
        norms = [float(optimizer.state[p]["exp_avg"].norm()) for p in model.parameters()]
        optimizer.state_dict()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer), norms


@scenario
def sparse_gradients_with_momentum(on):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 60, sparse=True), nn.Linear(60, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    on(model, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3 + number])).square().mean().backward()
        optimizer.step()
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"].to_dense()
    return [p.detach() for p in model.parameters()], state_dict


@scenario
def sparse_adam(on):
    torch.manual_seed(0)
    model = nn.Embedding(100, 60, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    on(model, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3 + number])).square().mean().backward()
        optimizer.step()
    return everything(model, optimizer)


@scenario
def complex_parameters(on):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(60, 60, dtype=torch.complex64))
    optimizer = AdamW(model.parameters(), amsgrad=True, foreach=True)
    on(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model.weight.abs().square().mean().backward()
        optimizer.step()
    return everything(model, optimizer)


@scenario
def parameters_that_are_frozen_in_turn(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    for number in range(8):
        for n, parameter in enumerate(model.parameters()):
            parameter.requires_grad_((number + n) % 3 != 0)
        train(model, optimizer, 1, begin=number)
    return everything(model, optimizer)


@scenario
def a_default_device(on):
    model = make_model()
    optimizer = Momentum(model.parameters())
    on(model, optimizer)
    loss_of(model, 0).backward()
    with torch.device("meta"):
        optimizer.step()
    return everything(model, optimizer)


@scenario
def sharpness_aware_minimization(on):
    class Sam(Optimizer):
        def __init__(self, params):
            super().__init__(params, {"rho": 0.05})
            self.base = AdamW(self.param_groups, lr=0.01)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            torch.enable_grad()(closure)()
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            for parameter in params:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad * 0.05 / norm)
            torch.enable_grad()(closure)()
            for parameter in params:
                parameter.data = self.state[parameter]["old"]
            self.base.step()

    found = []
    for which in (0, 1, 2):
        model = make_model()
        optimizer = Sam(model.parameters())
        on(model, *([optimizer], [optimizer.base], [optimizer, optimizer.base])[which])
        for number in range(3):

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                loss_of(model, number).backward()

            optimizer.step(closure)
        found.append(everything(model, optimizer, optimizer.base))
    return found


@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_kinds_of_tensors_and_modes(function, tmp_path):
    assert_the_same(function, tmp_path)
