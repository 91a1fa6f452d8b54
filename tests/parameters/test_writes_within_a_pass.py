"""A write that torch does not count (through `.data`), between a parameter's use in forward and its use in backward.

Plain autograd saves the parameter itself or a view of its memory, so backward reads what was written. If the memory is
replaced, backward reads the new memory in the first case and the old memory in the second. Gradients must be those of
plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload
from offload.parameters import window
from offload.parameters.saved_parameter import SavedParameter, SavedView

WIDTH = 96
Write = Callable[[nn.Parameter], None]


class Middle(nn.Module):
    """A linear layer that writes to its weight before or after it uses it."""

    def __init__(self, before: Write | None = None, after: Write | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before(self.weight)
        result = functional.linear(x, self.weight)
        if self.after is not None:
            self.after(self.weight)
        return result


def zero_a_row(weight: nn.Parameter) -> None:
    weight[0].data.zero_()


def halve(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def replace(weight: nn.Parameter) -> None:
    weight.data = weight.data * 3


def gradients(model: nn.Module, between: Write | None) -> list[Tensor]:
    """Two steps: the gradients of input and parameters, and the parameters."""
    found = []
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(x).square().mean()
        if between is not None:
            for parameter in model.parameters():
                between(parameter)
        loss.backward()  # type: ignore[no-untyped-call]
        found += [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        found += [parameter.detach().clone() for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        pytest.param(zero_a_row, None, None, id="before its use"),
        pytest.param(None, zero_a_row, None, id="a row after its use"),
        pytest.param(None, halve, None, id="after its use"),
        pytest.param(None, None, halve, id="before backward"),
        pytest.param(None, None, replace, id="other memory before backward"),
        pytest.param(replace, None, None, id="other memory before its use"),
        pytest.param(None, replace, None, id="other memory after its use"),
    ],
)
def test_backward_reads_what_plain_autograd_would(parameters, before, after, between, tmp_path):
    if parameters == "frozen" and zero_a_row in (before, after):
        pytest.skip("writes through another view of a frozen parameter may be lost: docs/parameters.md says so")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Middle(before, after), nn.Linear(WIDTH, WIDTH))
    model[1].weight.requires_grad_(parameters == "all")
    model[2].requires_grad_(parameters == "all")
    expected = gradients(copy.deepcopy(model), between)
    with offload.enable(model, parameters=parameters, n_tensors=0, min_tensor_bytes=1 << 10, spill_dir=tmp_path):
        found = gradients(model, between)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def images(x: Tensor) -> Tensor:
    return x.view(4, 6, 4, 4)


class Images(nn.Module):
    """Operators that save a parameter itself: a convolution, a normalization and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixed = nn.Conv2d(6, 6, 3, padding=1)
        self.scaled = nn.LayerNorm([6, 4, 4])
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.scaled(self.mixed(images(self.before(x))))
        return mixed.flatten(1) @ self.table


def restride(weight: nn.Parameter) -> None:
    weight.data = weight.data.movedim(0, -1).contiguous().movedim(-1, 0)


def binarized(model: Images, x: Tensor, between: Write, parameters: object, folder: object) -> list[Tensor]:
    """The weights have other values in forward than in backward, as in binary networks."""
    for layer in (model.mixed, model.scaled):
        layer.requires_grad_(parameters == "all")
    model.table.requires_grad_(parameters == "all")
    handle = None
    if folder is not None:
        handle = offload.enable(model, parameters=parameters, n_tensors=0, min_tensor_bytes=256, spill_dir=folder)
    moved = [model.mixed.weight, model.scaled.weight, model.table]
    full = [each.data for each in moved]
    for each in moved:
        each.data = each.data.sign() * 0.05
    loss = model(x).square().mean()
    for each, value in zip(moved, full, strict=True):
        each.data = value
    del value, full
    for each in moved:
        between(each)
    if between is disable and handle is not None:
        handle.disable()
    loss.backward()
    return [x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def nothing(weight: nn.Parameter) -> None:
    pass


def disable(weight: nn.Parameter) -> None:
    """Moving ends before backward."""


def both_ways(between: Write, parameters: str, folder: object) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(4, WIDTH)
    return tuple(  # type: ignore[return-value]
        binarized(copy.deepcopy(model), x.clone().requires_grad_(), between, parameters, where)
        for where in (None, folder)
    )


@pytest.mark.parametrize("parameters", ["all", "frozen"])
@pytest.mark.parametrize("between", [nothing, restride, halve, disable])
def test_operators_that_save_the_parameter_itself_read_its_new_memory(between, parameters, tmp_path):
    expected, found = both_ways(between, parameters, tmp_path)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert [each.stride() for each in found] == [each.stride() for each in expected]


@pytest.mark.parametrize("parameters", ["all", "frozen"])
def test_a_view_in_place_of_the_parameter_is_missed(parameters, tmp_path, monkeypatch):
    saved = window.Window.saved

    def as_a_view(self: window.Window, tensor: Tensor) -> object:
        found = saved(self, tensor)
        record = getattr(found and found._parameter, "_offload_stored", None)
        return SavedView(tensor, found._parameter, record) if type(found) is SavedParameter else found

    monkeypatch.setattr(window.Window, "saved", as_a_view)
    expected, found = both_ways(nothing, parameters, tmp_path)
    assert not all(map(torch.equal, found, expected))


def test_what_stands_for_a_frozen_parameter_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "stands_for_object", lambda tensor: False)
    expected, found = both_ways(nothing, "frozen", tmp_path)
    assert not all(map(torch.equal, found, expected))


def test_a_detached_parameter_is_no_parameter(tmp_path):
    """Its graph keeps the memory that it has been given."""
    found = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        model = Middle()
        model.weight.requires_grad_(False)
        if is_enabled:
            offload.enable(model, parameters="frozen", n_tensors=0, min_tensor_bytes=256, spill_dir=tmp_path)
        x = torch.randn(4, WIDTH).requires_grad_()
        loss = (x @ model.weight.detach()).square().mean()
        replace(model.weight)
        loss.backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_backward_after_disable_leaves_parameters_in_memory(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    expected = copy.deepcopy(model)
    x = torch.randn(4, 256)
    expected(x).square().mean().backward()
    handle = offload.enable(model, parameters="all", memory_limit="3MiB", min_tensor_bytes=1 << 10, spill_dir=tmp_path)
    loss = model(x).square().mean()
    handle.disable()
    loss.backward(retain_graph=True)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
