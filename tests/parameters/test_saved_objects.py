"""A convolution saves its weight itself: backward reads the memory that the weight has then, so it must be there."""

import gc
import weakref

import pytest
import torch
from torch import nn

import offload
from offload.parameters import mover
from offload.parameters.moved_parameter import MovedParameter
from offload.parameters.window import Window

GIVEN = {"n_tensors": 0, "min_tensor_bytes": 1024}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3))


def enable(model, parameters, folder, **given):
    offload.enable(model, parameters=parameters, spill_dir=folder, **{**GIVEN, **given})


def gradients(model, x):
    return [x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def enabled_before_backward(model, x, parameters, folder):
    loss = model(x).square().mean()
    if folder is not None:
        enable(model, parameters, folder)
    loss.backward()
    return gradients(model, x)


def used_before_it_leaves(model, x, parameters, folder):
    """A layer that is new in the model leaves at the model's next forward; its graph is older."""
    if folder is not None:
        enable(model, parameters, folder)
    model[2] = nn.Conv2d(16, 8, 3).requires_grad_(parameters == "all")
    loss = model[2](model[1](model[0](x))).square().mean()
    with torch.no_grad():
        model(x)
    loss.backward()
    return gradients(model, x)


def frozen_before_backward(model, x, parameters, folder):
    if folder is not None:
        enable(model, parameters, folder)
    loss = model[2](model[1](model[0](x))).square().mean()
    model[2].requires_grad_(False)
    (loss + model(x).mean()).backward()
    return [x.grad]


def used_while_a_view_keeps_it(model, x, parameters, folder):
    """The view is dropped between two forwards, so the weight leaves at the second; the graph of the first is older."""
    view = model[2].weight.detach()
    if folder is not None:
        enable(model, parameters, folder, min_tensor_bytes=1)
    first = model(x).square().mean()
    del view
    second = model(2 * x).square().mean()
    first.backward()
    second.backward()
    return gradients(model, x)


WAYS = [enabled_before_backward, used_before_it_leaves, frozen_before_backward]


def played(way, parameters, folder=None):
    model = make_model()
    if parameters == "frozen" and way is not frozen_before_backward:
        model.requires_grad_(False)
    x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return model, way(model, x, parameters, folder)


def assert_plain_gradients(way, parameters, folder):
    (_, expected), (model, found) = played(way, parameters), played(way, parameters, folder)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    return model


@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize("way", [*WAYS, used_while_a_view_keeps_it])
def test_a_parameter_that_a_graph_has_saved_stays_until_backward(way, parameters, tmp_path):
    model = assert_plain_gradients(way, parameters, tmp_path)
    model(torch.randn(2, 8, 8, 8))
    weights = [model[0].weight, model[2].weight]
    movable = [each for each in weights if parameters == "all" or not each.requires_grad]
    assert movable
    assert {type(each) for each in movable} == {MovedParameter}


@pytest.mark.parametrize("way", WAYS)
def test_without_the_guard_it_is_missed(way, tmp_path, monkeypatch):
    monkeypatch.setattr(mover, "is_saved_itself", lambda parameter: False)
    with pytest.raises(AssertionError):
        assert_plain_gradients(way, "frozen", tmp_path)


def test_without_its_replacement_in_the_graph_it_is_missed(tmp_path, monkeypatch):
    def saved(window, tensor):
        return replaced(window, tensor) if "_offload_stored" in tensor.__dict__ else None

    replaced = Window.saved
    monkeypatch.setattr(Window, "saved", saved)
    with pytest.raises(AssertionError):
        assert_plain_gradients(used_while_a_view_keeps_it, "all", tmp_path)


def test_the_report_says_that_a_graph_holds_them(tmp_path):
    model = make_model()
    loss = model(torch.randn(2, 8, 8, 8)).mean()
    handle = offload.enable(model, parameters="all", spill_dir=tmp_path, **GIVEN)
    moved = handle.report().moved_parameters
    assert (moved.held, moved.tensors) == (2, 0)
    assert any("a pending backward pass" in note for note in moved.notes())
    loss.backward()
    model(torch.randn(2, 8, 8, 8))
    moved = handle.report().moved_parameters
    assert (moved.held, moved.tensors) == (0, 2)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_node_that_accumulates_gradients_does_not_hold_memory(is_hooked, tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nodes = [each.view_as(each).grad_fn.next_functions[0][0] for each in model.parameters()]
    if is_hooked:
        for node in nodes:
            node.register_hook(lambda *_: None)
    enable(model, "all", tmp_path)
    assert {type(layer.weight) for layer in model} == {MovedParameter}


class Changed(nn.Module):
    """Saves a parameter that an operator has changed in place: it is a result of the graph, and no leaf."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.states = []

    def forward(self, x):
        state = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.states.append(weakref.ref(state))
        state.copy_(self.layer(x)).tanh_()
        return state * 2


def test_a_parameter_that_is_a_result_does_not_hold_its_own_graph(tmp_path):
    model = Changed()
    enable(model, "all", tmp_path, n_tensors=-1, min_tensor_bytes=1)
    for _ in range(3):
        model(torch.ones(8))
    gc.collect()
    assert [each() for each in model.states] == [None] * 3


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        rows = [torch.ones(2, 3), 2 * torch.ones(3, 3)]
        self.rows = nn.Parameter(torch.nested.as_nested_tensor(rows, layout=torch.strided))

    def forward(self, x):
        return (self.rows * self.rows).to_padded_tensor(0.0).sum() * x


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("parameters", ["all", "frozen"])
def test_a_nested_parameter_is_saved_as_without(parameters, tmp_path):
    found = []
    for folder in (None, tmp_path):
        model = Nested()
        if folder is not None:
            enable(model, parameters, folder, n_tensors=-1, min_tensor_bytes=1)
        model(torch.ones(())).backward()
        found.append(model.rows.grad.to_padded_tensor(0.0))
    assert torch.equal(*found)


class Conjugated(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = (torch.randn(4, 4, dtype=torch.complex64) for _ in range(2))
        self.conjugated = nn.Parameter(first.conj())
        self.negated = nn.Parameter(torch._neg_view(second))

    def forward(self, x):
        return (x @ self.conjugated @ self.negated).abs().square().sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_is_conjugated_or_negated_lazily_stays(frozen, tmp_path):
    found = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model = Conjugated().requires_grad_(not frozen)
        x = torch.randn(4, 4, dtype=torch.complex64).requires_grad_()
        if folder is not None:
            enable(model, "frozen" if frozen else "all", folder, min_tensor_bytes=1)
        for _ in range(2):
            loss = model(x)
            loss.backward()
        found.append([loss.detach(), *gradients(model, x)])
        assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("parameters", ["all", "frozen"])
def test_a_parameter_that_is_emptied_becomes_an_ordinary_one(parameters, tmp_path):
    """As programs do that no longer use a layer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(parameters == "all")
    enable(model, parameters, tmp_path, n_tensors=-1, min_tensor_bytes=1)
    model(torch.ones(2, 8)).sum().backward()
    assert type(model[1].weight) is MovedParameter
    model[1].weight.data = torch.empty(0)
    model[1].forward = lambda x: x
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert type(model[1].weight) is nn.Parameter
    assert {name: each.numel() for name, each in model.state_dict().items()}["1.weight"] == 0
    offload.disable(model)
