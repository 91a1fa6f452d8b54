"""What users do with an optimizer's state and with several optimizers, plain and with the state moved."""

import copy
import threading
import weakref
from collections import defaultdict

import pytest
import torch
from optimizer_state.users_rig import On, Scenarios, assert_the_same, everything, loss_of, make_model, train, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves_with_path, tree_map

scenario = Scenarios()


@scenario
def two_models_in_two_threads(on):
    models = [make_model(), make_model()]
    optimizers = [AdamW(model.parameters()) for model in models]
    for pair in zip(models, optimizers, strict=True):
        on(*pair)
    errors = in_threads(train, [(*pair, 20) for pair in zip(models, optimizers, strict=True)])
    return errors, [everything(*pair) for pair in zip(models, optimizers, strict=True)]


@scenario
def two_optimizers_of_a_model_in_two_threads(on):
    model = make_model()
    params = list(model.parameters())
    optimizers = [AdamW(params[::2]), AdamW(params[1::2])]
    on(model, *optimizers)
    errors = []
    for number in range(20):
        model.zero_grad()
        loss_of(model, number).backward()
        errors += in_threads(lambda optimizer: optimizer.step(), [(each,) for each in optimizers])
    return errors, everything(model, *optimizers)


def in_threads(function, arguments):
    errors = []

    def run(given):
        try:
            function(*given)
        except BaseException as error:
            errors.append(repr(error))
            raise

    threads = [threading.Thread(target=run, args=(given,)) for given in arguments]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


@scenario
def an_optimizer_for_each_parameter_that_steps_in_backward(on):
    model = make_model()
    optimizers = {parameter: AdamW([parameter]) for parameter in model.parameters()}
    on(model, *optimizers.values())

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(4):
        loss_of(model, number).backward()
    return everything(model, *optimizers.values())


@scenario
def a_parameter_twice_in_a_group(on):
    model = make_model()
    params = list(model.parameters())
    optimizer = torch.optim.SGD([*params, params[0]], lr=0.1, momentum=0.9)
    on(model, optimizer)
    train(model, optimizer, 3)
    return everything(model, optimizer)


@scenario
def state_that_is_moved_to_another_parameter(on):
    """As programs do that add and remove points."""
    model = make_model()
    optimizer = AdamW([{"params": [p]} for p in model.parameters()])
    on(model, optimizer)
    train(model, optimizer, 2)
    group = optimizer.param_groups[0]
    [old] = group["params"]
    state = optimizer.state.pop(old)
    state["exp_avg"] = state["exp_avg"] * 1
    state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    model[0].weight = nn.Parameter(old.detach().clone())
    group["params"] = [model[0].weight]
    optimizer.state[model[0].weight] = state
    gone = weakref.ref(old)
    del old, state
    optimizer.zero_grad()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer), gone() is None


@scenario
def an_optimizer_around_another_with_the_same_state(on):
    class Around(Optimizer):
        def __init__(self, inner):
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state
            Optimizer.__setstate__(self, {})

        def step(self, closure=None):
            return self.inner.step(closure)

    found = []
    for is_first in (True, False):
        model = make_model()
        inner = AdamW(model.parameters())
        if is_first:
            on(model, inner)
        optimizer = Around(inner)
        if not is_first:
            on(model, inner)
        train(model, optimizer, 3)
        found.append((everything(model, optimizer), everything(model, inner)))
        on.off()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(60, 60))]})
        inner.param_groups[-1]["params"][0].sum().backward()
        inner.step()
        found.append((everything(model, optimizer), everything(model, inner)))
        on(model, inner)
        inner.step()
        found.append((everything(model, optimizer), everything(model, inner)))
    return found


@scenario
def state_in_shared_memory(on):
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters())
    optimizer.share_memory()
    on(model, optimizer)
    train(model, optimizer, 2)
    return everything(model, optimizer), [optimizer.state[p]["sum"].is_shared() for p in model.parameters()]


@scenario
def state_that_is_cleared(on):
    model, optimizer = trained(on)
    optimizer.state.clear()
    train(model, optimizer, 2, begin=2)
    return everything(model, optimizer)


@scenario
def state_that_is_joined_with_another(on):
    _, optimizer = trained(on)
    return list((optimizer.state | {}).values()), list((defaultdict(dict) | optimizer.state).values())


@scenario
def a_tensor_that_the_program_holds(on):
    model, optimizer = trained(on)
    held = optimizer.state[model[0].weight]["exp_avg"]
    found = []
    for number in range(2, 5):
        train(model, optimizer, 1, begin=number)
        found.append(held.clone())
    return found, everything(model, optimizer)


@scenario
def hooks_that_change_the_state_as_it_is_saved(on):
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)

    def double(self):
        for _, state in self.state.items():
            state["exp_avg"].mul_(2)
        for parameter in model.parameters():
            self.state[parameter]["exp_avg_sq"].mul_(2)

    def sums(self, state_dict):
        return {**state_dict, "sums": [float(state["exp_avg"].sum()) for state in state_dict["state"].values()]}

    train(model, optimizer, 2)
    optimizer.register_state_dict_pre_hook(double)
    optimizer.register_state_dict_post_hook(sums)
    found = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    return found, everything(model, optimizer)


@scenario
def loaded_into_another_optimizer(on):
    model, other = make_model(), make_model()
    optimizers = AdamW(model.parameters()), AdamW(other.parameters())
    on(model, optimizers[0])
    train(model, optimizers[0], 2)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # without a copy, torch's share tensors
    train(other, optimizers[1], 2)
    train(model, optimizers[0], 1)
    return everything(model, optimizers[0]), everything(other, optimizers[1])


@scenario
def a_distributed_checkpoint(on):
    model, other = make_model(), make_model()
    optimizer, resumed = AdamW(model.parameters()), AdamW(other.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, 1)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
    train(model, optimizer, 2)
    on(other, resumed)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(saved))
    train(other, resumed, 2)
    return everything(model, optimizer), everything(other, resumed)


@scenario
def a_checkpoint_that_a_closure_loads(on):
    model, optimizer = trained(on)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)

    def closure():
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        loss = loss_of(model, 9)
        loss.backward()
        return loss

    loss = optimizer.step(closure).item()
    train(model, optimizer, 2, begin=5)
    return everything(model, optimizer), loss


@scenario
def disabled_within_a_step(on):
    model, optimizer = trained(on)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 3)
        loss.backward()
        on.off()
        return loss

    optimizer.step(closure)
    on(model, optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: on.off())
    train(model, optimizer, 1, begin=2)
    hook.remove()
    train(model, optimizer, 2, begin=3)
    return everything(model, optimizer)


@scenario
def a_map_over_the_state(on):
    model, optimizer = trained(on)
    doubled = tree_map(lambda each: each * 2, optimizer.state)
    assert list(doubled) == list(optimizer.state)
    places = sorted(str(path[1:]) for path, _ in tree_leaves_with_path(optimizer.state))
    return type(doubled).__name__, [doubled[each] for each in model.parameters()], places


@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_state_that_users_handle(function, tmp_path):
    assert_the_same(function, tmp_path)


def test_one_bound_for_the_writes_of_all_optimizers(tmp_path, monkeypatch):
    from offload.optimizer_state import mover, write_behind

    most = []
    wait = write_behind.WriteBehind.wait

    def watched(self, engine, nbytes_max):
        wait(self, engine, nbytes_max)
        most.append(sum(each.in_flight_bytes for each in self._writing))

    monkeypatch.setattr(write_behind.WriteBehind, "wait", watched)
    on, model = On(True, tmp_path), make_model()
    optimizers = [AdamW([p]) for p in model.parameters()]
    on(model, *optimizers)
    largest = max(p.nbytes for p in model.parameters())
    for number in range(4):
        model.zero_grad()
        loss_of(model, number).backward()
        for each in optimizers:
            each.step()
    assert 0 < max(most) <= mover.BEHIND_BYTES + largest
    on.off()
