"""What the engine cannot serve is refused with what to do instead; shallow copies of an enabled model run plain."""

import copy

import pytest
import torch
from accelerator import is_simulated
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_rig import KNOBS, assert_same, batch, make_blocks, train

import offload


def is_plain(model):
    return all("forward" not in module.__dict__ for module in model.modules())


def test_enabled_twice():
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        with pytest.raises(ValueError, match=r"already enabled on this model; call offload\.disable\(model\) first"):
            offload.enable(model, **KNOBS)
        train(model, model, 1)
        assert handle.report().steps == 1
    assert is_plain(model)


def test_part_of_an_enabled_model():
    model = make_blocks()
    with offload.enable(model, **KNOBS):
        with pytest.raises(
            ValueError, match=r"enabled on a Blocks that this model is a part of \('blocks\.1'\).*disable"
        ):
            offload.enable(model.blocks[1], **KNOBS)
        assert "forward" not in model.blocks[1].__dict__
    with offload.enable(model.blocks[1], **KNOBS):
        assert "forward" in model.blocks[1].__dict__
    assert is_plain(model)


def test_model_with_an_enabled_part():
    model = make_blocks()
    expected = train(*[make_blocks()] * 2, 2)
    with offload.enable(model.blocks[1], **KNOBS) as handle:
        with pytest.raises(
            ValueError, match=r"enabled on 'blocks\.1', a part of this model.*disable on the part first"
        ):
            offload.enable(model, **KNOBS)
        assert "forward" not in model.__dict__
        assert_same(train(model, model, 2), expected)
        assert handle.report().steps == 2
    with offload.enable(model, **KNOBS):
        assert "forward" in model.__dict__
    assert is_plain(model)


@pytest.mark.parametrize("first", ["inner", "wrapper"])
def test_compiled_wrapper_and_the_model_inside(first):
    model = make_blocks()
    wrapper = torch.compile(model, backend="eager")
    one, other = (model, wrapper) if first == "inner" else (wrapper, model)
    with offload.enable(one, **KNOBS), pytest.raises(ValueError, match="one engine serves all of it"):
        offload.enable(other, **KNOBS)
    assert is_plain(model)


def test_two_models_side_by_side_are_two_engines():
    one, other = make_blocks(), make_blocks()
    with offload.enable(one, **KNOBS) as first, offload.enable(other, **KNOBS) as second:
        chain = nn.Sequential(one, nn.Linear(8, 64), other)
        chain(batch(0)).sum().backward()
        assert first.report().swapped.tensors == second.report().swapped.tensors > 0


@pytest.mark.parametrize("depth", ["itself", "inside"])
def test_data_parallel(depth):
    parallel = nn.DataParallel(make_blocks())
    model = parallel if depth == "itself" else nn.Sequential(parallel)
    where = "the model is" if depth == "itself" else "the model's '0' is"
    with pytest.raises(ValueError, match=rf"{where} a DataParallel.*use torch\.nn\.parallel\.DistributedDataParallel"):
        offload.enable(model, **KNOBS)
    assert is_plain(model)


def test_data_parallel_around_an_enabled_model_is_said_at_its_first_step():
    """What DataParallel does on several devices: replicas share the model's dictionary, and the wrapper in it."""
    model = make_blocks()
    with offload.enable(model, **KNOBS) as handle:
        replica = model._replicate_for_data_parallel()
        with pytest.raises(ValueError, match="DataParallel copies the model to several devices at every step"):
            replica(batch(0))
        train(model, model, 1)
        assert handle.report().steps == 1


def test_distributed_data_parallel_is_no_data_parallel():
    assert not issubclass(DistributedDataParallel, nn.DataParallel)


class Switched(nn.Module):
    """Its result tells which object's attribute it saw."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.factor = 1.0

    def forward(self, x):
        return self.linear(x * self.factor).sin() * self.factor


@pytest.mark.parametrize("hooked", [False, True])
def test_shallow_copy_is_itself_and_plain(hooked):
    """Plain and enabled models behave alike when they are copied: the copy runs with its own attributes."""
    torch.manual_seed(0)
    model = Switched()
    if hooked:
        model.register_forward_hook(lambda module, args, output: output * 2)
    plain = copy.copy(model)
    plain.factor = 3.0
    expected = plain(batch(0))
    with offload.enable(model, **KNOBS) as handle:
        twin = copy.copy(model)
        twin.factor = 3.0
        assert torch.equal(twin(batch(0)), expected)
        assert handle.report().steps == 0, "the copy's forward is no step of the original"
        assert not torch.equal(model(batch(0)), expected)
        assert handle.report().steps == 1
    assert torch.equal(twin(batch(0)), expected), "also when the original is disabled again"
    assert "forward" not in model.__dict__


def test_shallow_copy_survives_the_original():
    model = Switched()
    expected = copy.copy(model)(batch(0))
    handle = offload.enable(model, **KNOBS)
    twin = copy.copy(model)
    del model
    assert handle._enabled.model is None
    assert torch.equal(twin(batch(0)), expected)


def test_shallow_copy_of_an_instance_with_a_forward_of_its_own():
    model = Switched()
    model.forward = lambda x: x * 5
    with offload.enable(model, **KNOBS) as handle:
        twin = copy.copy(model)
        assert torch.equal(twin(batch(0)), batch(0) * 5)
        assert handle.report().steps == 0


def test_shallow_copy_can_be_enabled_when_the_original_is_not():
    model = Switched()
    handle = offload.enable(model, **KNOBS)
    twin = copy.copy(model)
    twin.factor = 3.0
    handle.disable()
    expected = twin(batch(0))
    with offload.enable(twin, **KNOBS) as other:
        found = twin(batch(0))
        found.sum().backward()
        assert torch.equal(found, expected)
        assert not torch.equal(model(batch(0)), expected)
        assert other.report().swapped.tensors > 0
        assert handle.report().steps == 0
    assert "forward" not in twin.__dict__


class Stage:
    """What pipelines hand around: not a module, with the module in it."""

    def __init__(self, submod):
        self.submod = submod


def test_pipeline_stage_object():
    with pytest.raises(ValueError, match=r"not Stage: enable its own part of the model, stage\.submod"):
        offload.enable(Stage(make_blocks()))
    with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, not Stage$"):
        offload.enable(Stage(None))


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated, reason="no graphs there; tests/twin/inside says that a stream counts as captured")
def test_capture_into_a_cuda_graph_is_refused():
    model = make_blocks().cuda()
    x = batch(0).cuda()
    with offload.enable(model, **KNOBS):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match=r"captured into a CUDA graph.*capture without offload"):
            torch.cuda.make_graphed_callables(model, (x,))
