"""What offload uses of torch that torch does not promise: every name is there and does what it is used for."""

import pytest
import torch
from torch.nn import Parameter

from offload import _core
from offload.torch_compat import tensors

READ = {"nbytes": 24, "_base": None, "_version": 0, "is_leaf": True, "is_nested": False, "layout": torch.strided}


@pytest.mark.parametrize("name", READ)
def test_attributes_of_a_tensor_are_descriptors(name):
    descriptor = getattr(torch.Tensor, name)
    assert descriptor.__get__(torch.zeros(6), torch.Tensor) == READ[name]
    assert descriptor.__get__(Parameter(torch.zeros(6)), Parameter) == READ[name]


def test_methods_of_a_tensor_take_it():
    x = torch.zeros(6)
    assert [torch.Tensor._is_view(each) for each in (x, x[1:])] == [False, True]
    assert torch.Tensor.detach(x).data_ptr() == x.data_ptr()
    assert torch.Tensor._base.__get__(x[1:]) is x


def test_the_interface_says_what_it_lacks():
    with pytest.raises(TypeError, match="wants layout"):
        _core.set_tensor_interface(tensor_type=torch.Tensor, parameter_type=Parameter, strided=torch.strided)
    tensors.set_interface()


def test_bytes_that_are_not_a_tensors_own():
    assert tensors.has_own_bytes(torch.zeros(2))
    assert not tensors.has_own_bytes(torch._efficientzerotensor(2))
    seen = []
    torch.func.vmap(lambda x: seen.append(tensors.has_own_bytes(x)) or x)(torch.zeros(2, 2))
    assert seen == [False]
