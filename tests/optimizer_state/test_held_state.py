"""State whose dictionary the program holds stays in memory, and leaves again once the program has dropped it."""

import copy

import pytest
from optimizer_state import users_rig
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import On, Scenarios, assert_the_same, both, everything, train, trained
from torch.optim import AdamW

from offload.optimizer_state import streamed_state
from offload.optimizer_state.mover import StateMover

scenario = Scenarios()


@scenario
def the_dictionary_of_a_parameter(on):
    """Its tensors are read and written without another look-up in `optimizer.state`."""
    model, optimizer = trained(on)
    held = optimizer.state[model[0].weight]
    found = []
    for number in range(2, 5):
        train(model, optimizer, 1, begin=number)
        found.append(held["exp_avg"].clone())
        held["exp_avg"].mul_(0.5)
    return found, everything(model, optimizer)


@scenario
def all_dictionaries_taken_before_enable(on):
    model = users_rig.make_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    held = list(optimizer.state.values())
    on(model, optimizer)
    found = [copy.deepcopy(held)]
    train(model, optimizer, 2, begin=1)
    return found, copy.deepcopy(held), everything(model, optimizer)


@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_what_a_held_dictionary_has_is_true(function, tmp_path):
    assert_the_same(function, tmp_path)


@pytest.mark.parametrize("function", scenario, ids=lambda function: function.__name__)
def test_a_guard_that_is_left_out_is_missed(function, tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_state, "is_held", lambda *_: False)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal(*both(function, tmp_path)[:2])


def tensors_in_memory(optimizer):
    state = optimizer.state
    away = {id(each.tensor) for tensors in state.tensors.values() for each in tensors if each.is_away}
    large = [value for values in dict.values(state) for value in values.values() if value.nbytes >= 1024]
    return sum(id(each) not in away for each in large)


def test_it_leaves_again_after_the_program_has_dropped_it(tmp_path):
    on = On(True, tmp_path)
    model, optimizer = trained(on)
    assert tensors_in_memory(optimizer) == 0
    held = optimizer.state[model[0].weight]
    train(model, optimizer, 1)
    assert tensors_in_memory(optimizer) == on.counts[0].held == 2
    assert "dictionary" in str(on.handles[0].report())
    del held
    train(model, optimizer, 1)
    assert tensors_in_memory(optimizer) == on.counts[0].held == 0
    held = optimizer.state[model[0].weight]  # taken and dropped between two steps
    del held
    train(model, optimizer, 1)
    assert tensors_in_memory(optimizer) == on.counts[0].held == 0
    on.off()


def test_it_leaves_while_a_checkpoint_is_loaded(tmp_path):
    """`load_state_dict` holds the dictionaries until it returns."""
    on = On(True, tmp_path)
    _, optimizer = trained(on)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert tensors_in_memory(optimizer) == 0
    on.off()


def test_it_leaves_in_backward(tmp_path):
    """The step that has begun holds the dictionaries of the parameters that it has updated."""
    on = On(True, tmp_path, optimizer_state=True, step_in_backward=True)
    model, optimizer = trained(on)
    optimizer.zero_grad()
    users_rig.loss_of(model, 2).backward()
    assert tensors_in_memory(optimizer) == 0
    optimizer.step()
    on.off()


@pytest.mark.parametrize(
    "test", [test_it_leaves_while_a_checkpoint_is_loaded, test_it_leaves_in_backward], ids=lambda test: test.__name__
)
def test_a_holder_that_is_not_counted_is_missed(test, tmp_path, monkeypatch):
    leave = StateMover._leave
    monkeypatch.setattr(
        StateMover, "_leave", lambda self, state, key, need, own_holders=0: leave(self, state, key, need)
    )
    with pytest.raises(AssertionError):
        test(tmp_path)
