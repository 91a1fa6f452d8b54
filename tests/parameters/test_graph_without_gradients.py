"""Calls that have to do with the graph get the parameter itself, also inside `torch.no_grad()`."""

import pytest
import torch
from torch import nn

import offload
from offload.parameters import moved_parameter
from offload.parameters.moved_parameter import MovedParameter

GIVEN = {"n_tensors": -1, "min_tensor_bytes": 1, "parameters": "all"}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def loss_of(model, number=0):
    return model(torch.randn(4, 16, generator=torch.Generator().manual_seed(number))).square().mean()


def by_grad(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def by_backward(model, loss):
    loss.backward(inputs=list(model.parameters()))
    return [each.grad for each in model.parameters()]


def by_its_own_backward(model, loss):
    scale = nn.Parameter(torch.ones(()))
    model[0].register_parameter("scale", scale)
    model(torch.ones(1, 16))
    scale.backward()
    return [scale.grad]


def by_hooks(model, loss):
    found = []
    weight, bias, *others = model.parameters()
    weight.register_hook(found.append)
    bias.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone()))
    torch.autograd.graph.register_multi_grad_hook(others, lambda gradients: found.extend(gradients))
    weight.retain_grad()
    loss.backward()
    assert len(found) == 4
    return [*found, weight.grad]


CALLS = [by_grad, by_backward, by_its_own_backward, by_hooks]


def called(call, folder=None):
    model = make_model()
    if folder is not None:
        offload.enable(model, spill_dir=folder, **GIVEN)
    loss = loss_of(model)
    with torch.no_grad():
        found = [each.clone() for each in call(model, loss)]
    if folder is not None:
        assert {type(each) for each in model.parameters()} == {MovedParameter}
    return found


@pytest.mark.parametrize("call", CALLS)
def test_calls_under_no_grad(call, tmp_path):
    expected, found = called(call), called(call, tmp_path)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))


class Curvature(torch.optim.Optimizer):
    """Divides by a diagonal of the Hessian, which it computes in `step` from the graph of the gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters]
        ones = [torch.ones_like(each) for each in parameters]
        found = torch.autograd.grad(gradients, parameters, grad_outputs=ones)
        for parameter, curvature in zip(parameters, found, strict=True):
            self.state[parameter]["h"] = curvature.abs()
            parameter.addcdiv_(parameter.grad, curvature.abs().sqrt() + 1e-2, value=-1e-2)


def trained(folder=None, *, knows_optimizer=False):
    model = make_model()
    optimizer = Curvature(model.parameters())
    if folder is not None:
        given = {"optimizer": optimizer, "optimizer_state": True} if knows_optimizer else {}
        offload.enable(model, spill_dir=folder, **GIVEN, **given)
    for number in range(4):
        loss_of(model, number).backward(create_graph=True)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("knows_optimizer", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_an_optimizer_that_differentiates_gradients(knows_optimizer, tmp_path):
    assert all(map(torch.equal, trained(tmp_path, knows_optimizer=knows_optimizer), trained()))


def unfrozen(folder=None, **given):
    """The optimizer steps under `no_grad`, as some trainers do, and a layer is unfrozen."""
    model = make_model()
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if folder is not None:
        given = {"optimizer": optimizer, "optimizer_state": True, **given}
        handle = offload.enable(model, spill_dir=folder, **GIVEN, **given)
    for number in range(6):
        if number == 3:
            model[2].requires_grad_(True)
        loss_of(model, number).backward()
        with torch.no_grad():
            optimizer.step()
            optimizer.zero_grad()
    if folder is not None:
        assert handle.report().moved_parameters.trained == 4
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("given", [{"gradients": True}, {"step_in_backward": True}])
def test_a_layer_that_is_unfrozen(given, tmp_path):
    assert all(map(torch.equal, unfrozen(tmp_path, **given), unfrozen()))


@pytest.mark.parametrize("call", [by_grad, by_its_own_backward, by_hooks])  # not every torch asks in the other
def test_without_the_list_of_these_calls_it_is_missed(call, tmp_path, monkeypatch):
    monkeypatch.setattr(moved_parameter, "USES_THE_GRAPH", frozenset())
    with pytest.raises((RuntimeError, AttributeError), match=r"to not have been used|NoneType|on non-leaf tensors"):
        called(call, tmp_path)
