"""DDP gives its buckets of gradients the strides of the parameters, also while these are away."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.parameters import moved_parameter, mover, stored_parameter
from offload.parameters.moved_parameter import MovedParameter
from offload.torch_compat import held_objects

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

GIVEN = {"parameters": "all", "n_tensors": 0, "min_tensor_bytes": 1}
OPTIONS = [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.fixture(autouse=True)
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_model():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 16, 3)
    pointwise = nn.Conv2d(16, 16, 1)  # is_contiguous() is true of its weight in any memory format
    last = nn.Sequential(pointwise, nn.Flatten())
    model = nn.Sequential(*convolutions, last, nn.Linear(16, 8), nn.Linear(8, 1))
    return model.to(memory_format=torch.channels_last)


def trained(options, when=None, folder=None):
    """Gradients, their strides, and the warnings of a few steps."""
    model = make_model()
    if when == "before":
        offload.enable(model, spill_dir=folder, **GIVEN)
        evaluate(model)
    ddp = DistributedDataParallel(model, **options)
    if when == "after":
        offload.enable(ddp, spill_dir=folder, **GIVEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    torch.set_warn_always(True)  # else C++ code gives each warning once in a process
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            found += [each.grad.clone() for each in model.parameters()]
            optimizer.step()
    torch.set_warn_always(False)
    return model, found, [str(each.message) for each in told]


def evaluate(model):
    with torch.no_grad():
        model(torch.randn(1, 4, 5, 5))


def assert_as_plain(options, when, folder):
    (_, expected, told), (model, found, also_told) = trained(options), trained(options, when, folder)
    assert also_told == told
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_are_those_of_plain_training(when, options, tmp_path):
    model = assert_as_plain(options, when, tmp_path)
    kinds = [type(layer.weight) for layer in (model[0], model[2], model[3][0], model[4], model[5])]
    assert kinds == [nn.Parameter] * 3 + [MovedParameter] * 2


def test_what_left_before_the_group_comes_back(tmp_path):
    """Also what no module reads."""
    torch.distributed.destroy_process_group()
    model = make_model()
    model[1].unused = nn.Linear(8, 8)
    model[1].unused.weight.data = torch.randn(8, 8).t()
    offload.enable(model, spill_dir=tmp_path, **GIVEN)
    assert type(model[1].unused.weight) is MovedParameter
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    evaluate(model)
    assert {type(model[2].weight), type(model[1].unused.weight)} == {nn.Parameter}
    assert type(model[4].weight) is MovedParameter
    torch.distributed.destroy_process_group()
    evaluate(model)
    assert {type(each) for each in model.parameters()} == {MovedParameter}


def test_it_is_back_before_a_reducer_is_made(tmp_path):
    torch.distributed.destroy_process_group()
    model = make_model()
    offload.enable(model, spill_dir=tmp_path, **GIVEN)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    DistributedDataParallel(model)
    assert type(model[2].weight) is nn.Parameter


def test_frozen_ones_leave(tmp_path):
    model = make_model().requires_grad_(False)
    offload.enable(model, spill_dir=tmp_path, **GIVEN)
    assert {type(each) for each in model.parameters()} == {MovedParameter}


def test_without_the_guard_it_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(moved_parameter, "may_be_reduced", lambda parameter: False)
    with pytest.raises(AssertionError):
        assert_as_plain({}, "after", tmp_path)


def test_without_the_strides_of_one_element_it_is_missed(tmp_path, monkeypatch):
    def expanded(tensor):
        return torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)

    monkeypatch.setattr(stored_parameter, "nan_like", expanded)
    with pytest.raises(AssertionError):
        assert_as_plain({"gradient_as_bucket_view": True}, "after", tmp_path)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_graph_is_found_without_a_reducer(is_guarded, tmp_path, monkeypatch):
    """Of a forward before `enable`, in a process group without DDP."""

    def gradients(moves):
        model = make_model().to(memory_format=torch.contiguous_format)
        x = torch.ones(2, 4, 5, 5, requires_grad=True)
        loss = model(x).square().mean()
        if moves:
            offload.enable(model, spill_dir=tmp_path, **GIVEN)
        loss.backward()
        return [x.grad, *(each.grad for each in model.parameters())]

    if not is_guarded:
        monkeypatch.setattr(mover, "is_saved_itself", lambda parameter: False)
    assert all(map(torch.equal, gradients(moves=True), gradients(moves=False))) is is_guarded


def test_a_reducer_is_not_taken_for_a_graph(tmp_path, monkeypatch):
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    offload.enable(ddp, spill_dir=tmp_path, **GIVEN)
    assert {type(each) for each in ddp.parameters()} == {MovedParameter}
    monkeypatch.setattr(held_objects, "may_be_reduced", lambda parameter: False)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    offload.enable(ddp, spill_dir=tmp_path, **GIVEN)
    assert {type(each) for each in ddp.parameters()} == {nn.Parameter}
