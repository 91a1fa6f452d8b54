"""A write that torch does not count (through `.data`), between a parameter's use in forward and its use in backward.

Plain autograd saves the parameter itself, so backward reads what was written. Gradients must be those of plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload

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
