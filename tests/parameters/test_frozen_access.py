"""What programs do with frozen parameters, plain and with these in the store: the same values, wherever they are read.

Each scenario is a function of a model and of `check`, which is called with values to be compared. Afterwards the model
runs twice more.
"""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from parameters.frozen_rig import (
    WIDTH,
    assert_away,
    assert_equal,
    away,
    batch,
    enable,
    everything,
    loss_of,
    make_model,
    trained,
)
from torch import nn
from torch.nn import functional as F

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


def loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def as_floats(address, count):
    return torch.tensor(list((ctypes.c_float * count).from_address(address)))


@scenario
def state_dict_is_saved(model, check):
    check(*model.state_dict().values(), *loaded(model.state_dict()).values())


@scenario
def a_deep_copy(model, check):
    copied = copy.deepcopy(model)
    check(copied(batch(1)), *copied.parameters(), copy.deepcopy(model.first.weight))
    assert {type(each) for each in copied.parameters()} == {nn.Parameter}
    assert copied.head.weight is copied.first.weight


@scenario
def a_model_that_is_pickled(model, check):
    model.first.weight.remark = "kept"
    for copied in (pickle.loads(pickle.dumps(model)), loaded(model)):
        check(copied(batch(1)))
        assert {type(each) for each in copied.parameters()} == {nn.Parameter}
        assert copied.first.weight.remark == "kept"


@scenario
def reading_in_a_loop(model, check):
    check(*(parameter.sum() for parameter in model.parameters()), *(p.norm() for p in model.parameters()))
    check(torch.cat([p.flatten() for p in model.parameters()]), torch.stack([model.first.weight, model.head.weight]))
    check(*torch._foreach_norm(list(model.parameters())), nn.utils.parameters_to_vector(model.parameters()))


@scenario
def addresses_and_arrays(model, check):
    weight = model.blocks[1].into.layer.weight
    check(as_floats(weight.data_ptr(), weight.numel()), as_floats(weight.untyped_storage().data_ptr(), weight.numel()))
    check(torch.from_numpy(weight.numpy().copy()), torch.from_numpy(np.asarray(weight).copy()))
    check(torch.from_dlpack(weight).clone(), torch.tensor(weight.tolist()), torch.tensor(weight[0, 0].item()))


@scenario
def an_address_until_the_next_forward(model, check):
    address = model.first.weight.data_ptr()
    for parameter in model.parameters():
        parameter.sum()
    check(as_floats(address, WIDTH))


@scenario
def what_is_held_stays_valid(model, check):
    held = [parameter.detach() for parameter in model.parameters()]
    views = [parameter.t() for parameter in model.parameters() if parameter.ndim == 2]
    arrays = [parameter.detach().numpy() for parameter in model.parameters()]
    for number in range(3):
        loss_of(model, number).backward()
    check(*held, *views, *map(torch.from_numpy, arrays))


@scenario
def moving_to_where_it_is(model, check):
    check(*model.to("cpu").parameters(), *model.to(torch.float32).parameters())


@scenario
def another_dtype_and_back(model, check):
    check(*model.double().parameters(), model(batch(1).double()))
    check(*model.bfloat16().parameters(), model(batch(1).bfloat16()))
    model.float()


@scenario
def writing_in_place(model, check):
    with torch.no_grad():
        model.first.weight.add_(1)
        model.blocks[0].into.layer.weight[3] = 7
        weight = model.blocks[1].into.layer.weight
        weight *= 2
        assert weight is model.blocks[1].into.layer.weight
        torch.add(weight, 1, out=model.blocks[2].into.layer.weight)
    check(model(batch(1)))


@scenario
def writing_behind_the_version(model, check):
    model.first.weight.data += 1
    model.blocks[0].into.layer.weight.data.mul_(2)
    model.blocks[1].into.layer.weight.numpy()[0] = 5
    torch.from_dlpack(model.blocks[2].into.layer.weight)[1] = 6
    (ctypes.c_float * 1).from_address(model.blocks[2].out.layer.weight.data_ptr())[0] = 4
    check(model(batch(1)))


@scenario
def writing_through_views(model, check):
    model.first.weight.detach().numpy()[0] = 5
    state = model.state_dict()
    next(each for name, each in state.items() if name.endswith("out.layer.weight")).numpy()[:] = 0.5
    del state
    check(model(batch(1)))


@scenario
def writing_through_what_was_read_long_ago(model, check):
    held = model.first.weight.data
    check(model(batch(1)), model(batch(2)))
    held += 1
    check(model(batch(1)))


@scenario
def other_memory_in_its_place(model, check):
    model.first.weight.data = torch.ones(WIDTH, WIDTH)
    model.blocks[0].into.layer.weight.set_(torch.full((3 * WIDTH, WIDTH), 0.01))
    check(model(batch(1)))
    check(model(batch(2)))
    model.first.weight.data = torch.ones(WIDTH, WIDTH).t() * 2
    check(model.first.weight, model(batch(1)))


@scenario
def other_memory_while_it_is_in_memory(model, check):
    held = model.first.weight.detach()
    model.first.weight.set_(torch.ones(WIDTH, WIDTH))
    check(held, model.first.weight, model(batch(1)))


@scenario
def merging_an_adapter(model, check):
    for block in model.blocks:
        delta = block.into.up.weight @ block.into.down.weight
        block.into.layer.weight.data += delta
        check(model(batch(1)))
        block.into.layer.weight.data -= delta
    check(model(batch(2)))


@scenario
def loading_a_checkpoint(model, check):
    other = {name: 2 * value for name, value in make_model().state_dict().items()}
    model.load_state_dict(other)
    check(model(batch(1)))
    model.load_state_dict({name: value.clone() for name, value in make_model().state_dict().items()}, assign=True)
    check(model(batch(1)))


@scenario
def it_is_trained_from_now_on(model, check):
    model.first.weight.requires_grad_(True)
    model.blocks[0].into.layer.weight.requires_grad = True
    loss_of(model, 1).backward()
    check(model.first.weight.grad, model.blocks[0].into.layer.weight.grad)
    assert type(model.first.weight) is nn.Parameter
    model.requires_grad_(True)
    loss_of(model, 2).backward()
    check(*(parameter.grad for parameter in model.parameters()))
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    model.zero_grad()


@scenario
def it_is_used_by_others(model, check):
    x = batch(1).requires_grad_()
    weight = model.first.weight
    y = F.linear(x, weight) + x @ weight.t() + torch.einsum("bi,oi->bo", x, weight) + Product.apply(x, weight)
    for number in range(3):
        loss_of(model, number)
    y.sum().backward()
    check(y, x.grad)


class Product(torch.autograd.Function):
    """Saves the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        _, weight = ctx.saved_tensors
        return gradient @ weight.t(), None


@scenario
def a_function_of_the_program_saves_it(model, check):
    forward = model.head.forward
    model.head.forward = lambda x: Product.apply(
        Product.apply(x, model.blocks[0].into.layer.weight[:WIDTH]), model.head.weight
    )
    loss_of(model, 1).backward()
    check(*(parameter.grad for parameter in trained(model)))
    model.head.forward = forward
    model.zero_grad()


@scenario
def transforms_of_functions(model, check):
    given = {"first.weight": torch.ones(WIDTH, WIDTH)}
    check(torch.func.functional_call(model, given, (batch(1),)), torch.func.vmap(model, randomness="same")(batch(1)))
    check(torch.func.jvp(model, (batch(1),), (batch(2),))[1])


class Halves(torch.Tensor):
    """A subclass with an override of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result / 2 if func is torch.mul else result


@scenario
def an_override_of_another_class(model, check):
    x = batch(1).as_subclass(Halves)
    found = torch.mul(x, model.first.weight[:8]), F.linear(x, model.first.weight)
    check(*(each.as_subclass(torch.Tensor) for each in found))


@scenario
def it_is_shared_with_other_processes(model, check):
    model.share_memory()
    assert model.first.weight.is_shared()
    check(*model.parameters(), model(batch(1)))


@scenario
def layers_that_are_added_or_replaced(model, check):
    torch.manual_seed(3)
    model.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    check(model(batch(1)))
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    check(model(batch(1)))
    model.first.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    check(model(batch(1)))


@scenario
def what_tells_of_the_shape(model, check):
    weight = model.first.weight
    assert (weight.shape, weight.stride(), weight.numel()) == ((WIDTH, WIDTH), (WIDTH, 1), WIDTH**2)
    assert (weight.is_contiguous(), weight.is_leaf, weight.requires_grad, weight.grad) == (True, True, False, None)
    assert (weight.dtype, weight.device.type) == (torch.float32, "cpu")
    assert isinstance(weight, nn.Parameter)
    assert "Parameter containing" in repr(weight)
    assert torch.empty_like(weight).shape == weight.new_zeros(WIDTH, WIDTH).shape
    assert len({weight, model.head.weight}) == 1
    check(torch.zeros_like(weight))


def run(function, folder=None):
    """The values of a scenario, and what a model gives after it."""
    model = make_model()
    handle = enable(model, folder) if folder is not None else None
    found = []
    torch.manual_seed(1)
    function(model, lambda *values: found.extend(value.detach().clone() for value in values))
    for number in range(2):
        torch.manual_seed(number)
        loss_of(model, number).backward()
    found += [*everything(model), *(each.grad for each in trained(model) if each.grad is not None)]
    return found, model, handle


LONG = {"transforms of functions"}  # torch compiles decompositions for them


@pytest.mark.parametrize(
    "function",
    [pytest.param(each, marks=pytest.mark.full) if name in LONG else each for name, each in SCENARIOS.items()],
    ids=SCENARIOS,
)
def test_a_program_sees_true_values(function, tmp_path):
    expected, _, _ = run(function)
    found, model, handle = run(function, tmp_path)
    assert_equal(found, expected)
    loss_of(model, 0)
    handle._enabled.parameters.engine.drain()  # a parameter stays while what the program changed is being copied out
    loss_of(model, 0)
    assert all(away(model))
    handle.disable()
    assert_equal(everything(model), everything(run(function)[1]))
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


def test_nothing_is_read_for_what_is_no_byte(tmp_path):
    """A usual loop asks each parameter for its gradient, shape and device."""
    model = make_model()
    handle = enable(model, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0).backward()
    before = handle.report().moved_parameters.in_bytes
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    optimizer.state_dict()
    model.to("cpu")
    model.train().eval()
    list(model.named_parameters())
    sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert handle.report().moved_parameters.in_bytes == before
    assert_away(model)


def test_reading_all_of_it_holds_little_at_a_time(tmp_path):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(40))).requires_grad_(False)
    handle = enable(model, tmp_path)
    window = handle._enabled.parameters.window
    largest = 0
    for parameter in model.parameters():
        parameter.sum()
        parameter.data  # noqa: B018
        largest = max(largest, window.nbytes())
    assert 0 < largest <= window.ahead.nbytes_max
    assert handle.report().moved_parameters.rewritten == 0
    model(batch(0))
    assert_away(model)


def test_what_others_share_stays(tmp_path):
    model = make_model()
    held = model.blocks[0].into.layer.weight.detach()
    model.blocks[1].into.layer.weight.data = model.blocks[2].into.layer.weight.data
    handle = enable(model, tmp_path)
    assert handle.report().moved_parameters.held == 3
    assert any("3 parameters stay because" in note for note in handle.report().notes)
    assert type(model.blocks[0].into.layer.weight) is nn.Parameter
    del held
    loss_of(model, 0)
    assert handle.report().moved_parameters.held == 2
    assert_away(model)


def test_what_is_frozen_later_leaves_at_the_next_forward(tmp_path):
    model = make_model().requires_grad_(True)
    handle = enable(model, tmp_path)
    assert handle.report().moved_parameters.tensors == 0
    model.first.requires_grad_(False)
    loss_of(model, 0)
    assert handle.report().moved_parameters.tensors == 1
    assert_away(model)
