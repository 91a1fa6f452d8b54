"""Code that uses a parameter without asking the parameter's class: TorchScript, and some functions of torch."""

import pytest
import torch
from parameters.frozen_rig import STEPS, WIDTH
from torch import nn
from torch.nn import functional as F

import offload
from offload.parameters.moved_parameter import MovedParameter


class Scripted(nn.Module):
    """A part that is called from C++, and a function that gets a parameter without asking the parameter's class."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x):
        bias = self.first.bias
        return self.part(added(bias.view_as(bias), F.linear(x, self.first.weight)))


@torch.jit.script
def added(bias, x):
    return F.gelu(x + bias)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_parts(tmp_path):
    def train(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(STEPS):
            loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return found

    torch.manual_seed(0)
    expected = train(Scripted())
    torch.manual_seed(0)
    model = Scripted()
    with offload.enable(model, parameters="all", min_tensor_bytes=64, spill_dir=tmp_path) as handle:
        found = train(model)
        assert handle.report().moved_parameters.tensors == 2
        assert all(map(torch.equal, found, expected))


class Subclass(torch.Tensor):
    pass


def as_data(p):
    other = torch.zeros(1)
    other.data = p
    return other


UNASKED = {
    "tensor": torch.tensor,
    "new_tensor": lambda p: torch.zeros(1).new_tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "FloatTensor": torch.FloatTensor,
    "data": as_data,
    "as_subclass": lambda p: p.as_subclass(Subclass),
    "sparse": lambda p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p, p.shape).to_dense(),
    "nested": lambda p: torch.nested.nested_tensor([p]).unbind()[0],
}


@pytest.mark.filterwarnings("ignore:.*sourceTensor:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", UNASKED)
def test_functions_that_do_not_ask_the_class_get_the_bytes_through_detach(name, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    expected = UNASKED[name](model.weight.detach()).clone()
    with offload.enable(model, parameters="all", min_tensor_bytes=64, spill_dir=tmp_path):
        assert type(model.weight) is MovedParameter
        found = UNASKED[name](model.weight.detach())
        assert torch.equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
