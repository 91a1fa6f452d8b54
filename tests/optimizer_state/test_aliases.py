"""Tensors of a state that share memory still do so in copies of the state, and once it is loaded, as in plain torch."""

import copy
import io

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import Momentum, On, Scenarios, both, everything, make_model, train, trained

from offload.optimizer_state import streamed_state
from offload.optimizer_state.aliases import Aliases

scenario = Scenarios()


class Aliased(Momentum):
    """Its steps write to `m` by another name too."""

    begin = 0

    def alias(self, parameter, state):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        group = self.param_groups[0]
        steps = group.get("steps", 0)
        for parameter in self.with_gradient:
            state = self.state[parameter]
            if "m" not in state:
                state["m"] = torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad)
            if steps == self.begin:
                self.alias(parameter, state)
            if "alias" in state:
                state["alias"].mul_(0.5)
            parameter.sub_(state["m"], alpha=group["lr"])
        group["steps"] = steps + 1
        return loss


class SameTensor(Aliased):
    def alias(self, parameter, state):
        state["alias"] = state["m"]


class View(Aliased):
    def alias(self, parameter, state):
        state["alias"] = state["m"].view(-1)


class SmallView(Aliased):
    """A view of less than `min_tensor_bytes`."""

    def alias(self, parameter, state):
        state["alias"] = state["m"].view(-1)[3:9]


class ViewsOfOneStorage(Aliased):
    def alias(self, parameter, state):
        both = torch.stack([state["m"], state["m"]])
        state["m"], state["other"], state["alias"] = both[0], both[1], both.transpose(0, -1)


class PartsOfOneStorage(Aliased):
    """The state's tensors are views of one tensor, and none of them overlaps another."""

    def alias(self, parameter, state):
        first, second = torch.stack([state["m"], torch.ones_like(parameter)])
        state["m"], state["other"] = first, second


class LateSameTensor(SameTensor):
    begin = 2


class LateView(View):
    begin = 2


class AcrossParameters(Aliased):
    """The state of one parameter is a view of the state of another."""

    def alias(self, parameter, state):
        if parameter is self.with_gradient[-1]:
            first, *_, last = self.with_gradient
            self.state[last]["alias"] = self.state[first]["m"].view(-1)


class OfTheParameter(Aliased):
    def alias(self, parameter, state):
        state["alias"] = parameter.detach()


KINDS = [SameTensor, View, SmallView, ViewsOfOneStorage, LateSameTensor, LateView, AcrossParameters]


def shared(optimizer, *others):
    """For each tensor of a state, the first one that is the same object, and the first one with the same memory."""
    values = [value for each in optimizer.state.values() for value in each.values()] + list(others)
    memory = [value.untyped_storage().data_ptr() for value in values]
    same = [next(n for n, each in enumerate(values) if each is value) for value in values]
    return same, [memory.index(each) for each in memory], [value.storage_offset() for value in values]


class Held:
    """A state dict, as an optimizer."""

    def __init__(self, state_dict):
        self.state = state_dict["state"]


@scenario
def the_state_dict(on, kind):
    _, optimizer = trained(on, kind, 4)
    saved = optimizer.state_dict()
    return shared(Held(saved)), saved


@scenario
def loaded(on, kind):
    model, optimizer = trained(on, kind, 4)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2, begin=4)
    return everything(model, optimizer), shared(optimizer)


@scenario
def a_copy_loaded(on, kind):
    model, optimizer = trained(on, kind, 4)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, begin=4)
    return everything(model, optimizer), shared(optimizer)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@scenario
def a_checkpoint_loaded(on, kind):
    model, optimizer = trained(on, kind, 4)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, 2, begin=4)
    return everything(model, optimizer), shared(optimizer)


@scenario
def an_optimizer_in_a_file(on, kind):
    _, optimizer = trained(on, kind, 4)
    found = through_a_file(optimizer)
    return shared(found), found.state_dict()


@scenario
def a_copied_optimizer(on, kind):
    model, optimizer = trained(on, kind, 4)
    model, optimizer = copy.deepcopy((list(model.parameters()), optimizer))
    for _ in range(2):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [each.detach() for each in model], optimizer.state_dict(), shared(optimizer, *model)


@scenario
def saved_in_a_hook_of_the_step(on, kind):
    model = make_model()
    optimizer = kind(model.parameters())
    found = []

    def save(*_):
        saved = optimizer.state_dict()
        found.extend([shared(Held(saved)), copy.deepcopy(saved), shared(copy.deepcopy(optimizer))])

    optimizer.register_step_post_hook(save)  # before that of offload, so state that moves is in memory
    on(model, optimizer)
    train(model, optimizer, 4)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_tensors_that_share_memory(function, kind, tmp_path):
    plain, moved, on = both(function, tmp_path, kind)
    assert_equal(moved, plain)
    on.off()


def test_parts_of_one_storage_leave_once_they_are_loaded(tmp_path):
    plain, moved, on = both(lambda on, kind: a_checkpoint_loaded(on, kind)[0], tmp_path, PartsOfOneStorage)
    assert_equal(moved, plain)
    (counts,) = on.counts
    nbytes = sum(2 * each.nbytes for each in make_model().parameters() if each.nbytes >= 1024)
    assert (counts.nbytes, counts.held) == (nbytes, 0)
    on.off()


def test_a_copied_optimizer_shares_memory_with_the_copied_parameters(tmp_path):
    plain, moved, on = both(a_copied_optimizer, tmp_path, OfTheParameter)
    assert_equal(moved, plain)
    on.off()


def test_a_state_dict_is_a_snapshot(tmp_path):
    on = On(True, tmp_path)
    model, optimizer = trained(on, View, 2)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    train(model, optimizer, 2, begin=2)
    assert_equal(saved, before)
    on.off()


def test_there_is_no_file_for_copies_of_tensors_that_share_memory(tmp_path, monkeypatch):
    on, made = On(True, tmp_path), []
    _, optimizer = trained(on, View, 2)
    monkeypatch.setattr(streamed_state.Snapshot, "__init__", lambda self, *given: made.append(given))
    optimizer.state_dict()
    assert made == []
    on.off()


def test_copies_share_memory():
    whole = torch.arange(24.0)
    rows, part, alone, sparse = whole[:12].view(3, 4), whole[4:8], whole[12:], torch.eye(3).to_sparse()
    later = whole[9:10]  # overlaps with rows, and not with the part before it
    values = [rows, part, alone, rows.t(), sparse, rows, sparse, later]
    aliases = Aliases([*values, 5])
    assert [each in aliases for each in values] == [each is not alone for each in values]
    assert aliases.copied(5) == 5
    copies = [aliases.copied(each) for each in values]
    assert copies[5] is copies[0]
    assert copies[6] is copies[4]
    for made, value in zip(copies, values, strict=True):
        assert made is not value
        assert torch.equal(made.to_dense(), value.to_dense())
    copies[1].zero_()
    assert torch.equal(copies[0], torch.tensor([[0.0, 1, 2, 3], [0, 0, 0, 0], [8, 9, 10, 11]]))
    assert torch.equal(copies[3], copies[0].t())
    assert torch.equal(whole, torch.arange(24.0))
