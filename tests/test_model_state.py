"""What a step knows of a model's tensors is what is there: whatever is changed between two steps is noticed."""

import gc

import pytest
import torch
from some_rows import one_in
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import offload
from offload.profiling.model_state import LOOKS_MAX, ModelState

ROWS = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.second(self.norm(self.first(x).relu())).tanh()


class FSDPModule:
    """A class of this name tells that parameters are gathered for a module."""


class ShardedLinear(FSDPModule, nn.Linear):
    pass


def known(state):
    return state.storages, state.devices, state.is_sharded, state.nbytes, state.gradient_bytes


def known_anew(model):
    state = ModelState(model)
    state.look()
    return known(state)


def step(model):
    model(torch.linspace(-1, 1, ROWS * 32).reshape(ROWS, 32)).sum().backward()


def add_parameter(model):
    model.first.register_parameter("extra", nn.Parameter(torch.ones(100)))


def replace_parameter(model):
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def swap_data(model):
    model.first.weight.data = model.first.weight.data.clone()


def swap_data_for_a_view(model):
    model.first.bias.data = torch.zeros(1000)[:32]


def share(model):
    model.second.weight = model.first.weight


def remove(model):
    model.norm = nn.Identity()


def add_buffer(model):
    model.norm.register_buffer("history", torch.zeros(50))


def replace_buffer(model):
    model.norm.running_mean = torch.zeros(32)


def wrap_module(model):
    model.second = nn.Sequential(model.second, nn.Linear(32, 32))


def add_parametrization(model):
    parametrizations.weight_norm(model.first)


def remove_parametrization(model):
    add_parametrization(model)
    parametrize.remove_parametrizations(model.first, "weight")


def grow_storage(model):
    model.first.bias.untyped_storage().resize_(1 << 12)


def change_class(model):
    model.second.__class__ = ShardedLinear


def move_a_part(model):
    model.norm.register_buffer("elsewhere", torch.empty(3, device="meta"))


def set_gradient(model):
    model.first.weight.grad = torch.zeros(32, 64)[:, ::2]


def drop_gradients(model):
    model.zero_grad()


CHANGES = (
    add_parameter,
    replace_parameter,
    swap_data,
    swap_data_for_a_view,
    share,
    remove,
    add_buffer,
    replace_buffer,
    wrap_module,
    add_parametrization,
    remove_parametrization,
    grow_storage,
    change_class,
    move_a_part,
    set_gradient,
    drop_gradients,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_looks_is_noticed(change):
    model = Net()
    step(model)
    state = ModelState(model)
    state.look()
    before = known(state)
    assert before == known_anew(model)
    keep = [
        *model.parameters(),
        *model.buffers(),
        *(each.grad for each in model.parameters()),
    ]  # no address comes again
    change(model)
    state.expire()
    state.look()
    assert known(state) == known_anew(model) != before
    del keep


@pytest.mark.parametrize("change", one_in(3, CHANGES[:-2]), ids=lambda change: change.__name__)
def test_a_change_between_steps_is_noticed(change, tmp_path):
    model = Net()
    handle = offload.enable(model, memory_limit="1GiB", min_tensor_bytes=1024, spill_dir=tmp_path)
    for _ in range(3):
        step(model)
    state = handle._on_device.state
    changes = state.changes
    step(model)
    assert state.changes == changes, "nothing is computed again while nothing changes"
    change(model)
    expected = known_anew(model)[:4]
    if change is not move_a_part:
        step(model)
    else:
        model(torch.ones(ROWS, 32))
    assert state.changes == changes + 1
    assert known(state)[:4] == expected
    handle.disable()


def test_a_plan_is_made_anew_where_an_optimizer_holds_more(tmp_path):
    """Its state counts: with Adam's the limit leaves less to activations."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    handle = offload.enable(model, memory_limit="1GiB", min_tensor_bytes=1024, spill_dir=tmp_path)
    held = handle._on_device.held
    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    optimizer.zero_grad()
    state = handle._on_device.state

    def found():
        state.expire()
        return held.look().state

    leaves = [leaf for each in optimizer.state.values() for leaf in each.values()]
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    assert found() == sum(each.untyped_storage().nbytes() for each in tensors)
    assert found() == found()
    before = found()
    optimizer.state[model.first.weight]["history"] = [torch.zeros(1000)]
    assert found() == before + 4000
    optimizer.state[model.first.weight]["history"].append((torch.zeros(10), {"more": torch.zeros(10)}))
    assert found() == before + 4080
    optimizer.state[model.first.weight]["history"][0].untyped_storage().resize_(8000)
    assert found() == before + 8080
    extra = nn.Parameter(torch.zeros(20))
    optimizer.add_param_group({"params": [extra]})
    optimizer.state[extra]["step"] = torch.zeros(20)
    assert found() == before + 8160
    handle.disable()


def test_a_storage_made_during_a_step_is_not_taken_for_one_that_a_parameter_had():
    """A moved parameter leaves its storage during forward; then an activation may be where that storage was."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    state = ModelState(model)
    state.look()
    for each in model.parameters():
        each.data = torch.zeros(8)
    made = [torch.zeros(8) for _ in range(200)]
    assert not any(state.holds_now(each.untyped_storage()._cdata) for each in made)


class CountedWatch:
    def __init__(self, watch):
        self.watch = watch
        self.looks = 0

    def look(self, model):
        self.looks += 1
        return self.watch.look(model)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_unknown_storages_are_looked_up_in_the_model_a_few_times_a_step(is_sharded):
    """A thousand layers with masks would otherwise read a thousand modules a thousand times; FSDP gathers parameters
    during the step, so there each storage is looked up."""
    model = Net()
    if is_sharded:
        model.second = ShardedLinear(32, 32)
    state = ModelState(model)
    watch = state._watch = CountedWatch(state._watch)
    state.look()
    model.register_buffer("early", torch.ones(3))
    assert state.holds_now(model.early.untyped_storage()._cdata)
    assert not any(state.holds_now(-number) for number in range(2, 3 * LOOKS_MAX))
    looks = watch.looks
    assert looks == 2 + (3 * LOOKS_MAX - 2 if is_sharded else LOOKS_MAX), "a look that finds a buffer does not count"
    assert not any(state.holds_now(-number) for number in range(2, 3 * LOOKS_MAX))
    assert watch.looks == looks, "what is known is not looked up"
    model.register_buffer("late", torch.ones(3))
    late = model.late.untyped_storage()._cdata
    assert state.holds_now(late) == is_sharded
    state.expire()
    state.look()
    assert state.holds_now(late)
    model.register_buffer("next", torch.ones(3))
    assert state.holds_now(model.next.untyped_storage()._cdata), "the next step looks again"


def test_a_dead_tensor_at_the_same_address_is_another():
    model = Net()
    state = ModelState(model)
    for count in range(1, 20):
        model.extra = nn.Parameter(torch.zeros(count))
        gc.collect()
        state.expire()
        state.look()
        assert known(state) == known_anew(model)


def test_a_module_without_dictionaries_is_looked_at_in_full():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    state = ModelState(model)
    for _ in range(2):
        state.expire()
        state.look()
    assert state.changes == 2
    assert known(state) == known_anew(model)


def test_an_optimizer_state_that_holds_itself(tmp_path):
    """Torch never walks it; neither endlessly do we."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with offload.enable(model, memory_limit="100MiB", spill_dir=tmp_path):
        for _ in range(4):
            model(torch.randn(ROWS, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.state[model.first.weight]
            state["itself"] = state
            nested = []
            for _ in range(100_000):
                nested = [nested]
            state["deep"] = nested
    state.pop("itself")
    while nested:
        nested = nested.pop()


def test_a_parameter_that_replaces_the_modules_dictionaries_while_it_is_read():
    """The device of a subclass is read by its own code, which may give the module other dictionaries."""
    replaced = []

    class Replacing(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            for name in ("_parameters", "_buffers", "_modules"):
                module.__dict__[name] = dict(module.__dict__[name])
                replaced.append({"another": torch.ones(1)})  # may be where the former dictionary was
            return super().__torch_function__(function, types, args, kwargs or {})

    module = Net()
    module.weight = Replacing(torch.ones(3))
    state = ModelState(module)
    state.look()
    before, seen = state.changes, len(replaced)
    state.expire()
    state.look()
    assert len(replaced) > seen
    assert state.changes == before, "nothing has changed"
