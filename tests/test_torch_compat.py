"""What offload uses of torch that torch does not promise: every name is there and does what it is used for."""

import pytest
import torch
from accelerator import is_simulated
from torch.nn import Parameter

from offload import _core
from offload.torch_compat import tensors
from offload.torch_compat.autograd import keeps_graph
from offload.torch_compat.modules import state_tensors
from offload.torch_compat.streams import raw_current_stream

READ = {"nbytes": 24, "_base": None, "_version": 0, "is_leaf": True, "is_nested": False, "layout": torch.strided}


@pytest.mark.parametrize("name", READ)
def test_attributes_of_a_tensor_are_descriptors(name):
    descriptor = getattr(torch.Tensor, name)
    assert descriptor.__get__(torch.zeros(6), torch.Tensor) == READ[name]
    assert descriptor.__get__(Parameter(torch.zeros(6)), Parameter) == READ[name]


@pytest.mark.parametrize("kept", [False, True])
def test_backward_tells_whether_it_keeps_its_graph(kept):
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: found.append(keeps_graph()))
    x.exp().sum().backward(retain_graph=kept)
    assert found == [kept]


def test_where_torch_does_not_tell_a_graph_may_be_kept(monkeypatch):
    monkeypatch.setattr("offload.torch_compat.autograd._keeps_graph", None)
    assert keeps_graph()


def test_a_storage_has_one_identity_and_tells_its_bytes():
    x = torch.zeros(6)
    first, second = x.untyped_storage(), x[2:].untyped_storage()
    assert torch.UntypedStorage.nbytes(first) == 24
    assert tensors.storage_identity(first) == tensors.storage_identity(second)
    assert tensors.storage_identity(first) != tensors.storage_identity(torch.zeros(6).untyped_storage())
    assert torch.UntypedStorage._cdata.__get__(first) == tensors.storage_identity(first)
    assert torch.Tensor._cdata.__get__(x) != torch.Tensor._cdata.__get__(x[2:])


def test_a_storage_is_watched_without_being_held():
    x = torch.zeros(6)
    watch = tensors.StorageWatch(x.untyped_storage())
    assert not watch.expired()
    del x
    assert watch.expired()
    watch.close()


def test_an_address_is_kept_from_being_used_again():
    x = torch.zeros(6)
    identity, keeper = x._cdata, torch._C._WeakTensorRef(x)
    del x
    assert all(torch.zeros(6)._cdata != identity for _ in range(100))
    assert keeper is not None


def test_versions_are_shared_by_views():
    x = torch.zeros(6)
    x[2:].add_(1)
    assert tensors.version_of(x) == tensors.version_of(x[3:]) == 1


def test_lazy_bits():
    x = torch.complex(torch.ones(2), torch.ones(2))
    assert torch.equal(torch._conj(x), x.conj())
    assert torch._conj(x).is_conj()
    assert torch._conj(x).data_ptr() == x.data_ptr()
    negated = torch._neg_view(torch.ones(2))
    assert negated.is_neg()
    assert torch.equal(negated, -torch.ones(2))


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated, reason="torch has this for its own kinds of devices")
def test_the_raw_stream_is_the_current_one():
    ask = raw_current_stream("cuda")
    assert ask is not None
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert ask(side.device_index) == side.cuda_stream
    assert ask(side.device_index) == torch.cuda.current_stream().cuda_stream


def test_other_kinds_have_no_raw_stream():
    assert raw_current_stream("nothing") is None


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


def test_a_modules_state_is_what_its_iterators_give():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.again = self.norm
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.second = torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.missing = None
            self.register_parameter("none", None)
            self.register_module("nothing", None)
            self.register_buffer("empty", None)

        def forward(self, x):
            return self.second(self.norm(self.first(x)))

    for model in (Tied(), torch.jit.trace(Tied(), torch.zeros(3, 4)), torch.nn.Sequential(torch.nn.LSTM(3, 3), Tied())):
        parameters, buffers = state_tensors(model)
        assert len(parameters) == len(list(model.parameters()))
        assert len(buffers) == len(list(model.buffers())) == 3
        addresses = {each.data_ptr() for each in [*model.parameters(), *model.buffers()]}
        assert {each.data_ptr() for each in [*parameters, *buffers]} == addresses
