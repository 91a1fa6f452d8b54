"""State that a program reads or puts in for one parameter after the other leaves again, unless the program holds it."""

import pytest
import torch
from optimizer_state.state_rig import (
    MIN_BYTES,
    O,
    assert_equal,
    everything,
    make_mover,
    make_optimizer,
    params_of,
    run,
)

from offload.optimizer_state import streamed_state


def trained(steps=3):
    optimizer = make_optimizer(O.AdamW, {})
    run(optimizer, steps)
    return optimizer


def in_memory(optimizer):
    """Bytes of the tensors that are large enough to leave and are in memory now."""
    away = {id(each.tensor) for tensors in optimizer.state.tensors.values() for each in tensors if each.is_away}
    values = [value for state in dict.values(optimizer.state) for value in state.values()]
    return sum(each.nbytes for each in values if id(each) not in away and each.nbytes >= MIN_BYTES)


def ask_for_all(optimizer, tmp_path):
    """One after the other: little is in memory at a time, and each one is right."""
    plain = trained()
    largest = max(optimizer.state.nbytes_of(param) for param in params_of(optimizer))
    for number, (param, known) in enumerate(zip(params_of(optimizer), params_of(plain), strict=True)):
        found = optimizer.state[param] if number % 2 else optimizer.state.get(param)
        assert_equal(found, plain.state[known])
        del found
        assert in_memory(optimizer) <= streamed_state.ASKED_BYTES + largest


def hold_some(optimizer, tmp_path):
    """A dictionary, a tensor, a view: what the program holds stays true."""
    plain = trained()
    first, second, third = (params_of(optimizer)[number] for number in (0, 2, 5))
    held = optimizer.state[first], optimizer.state[second]["exp_avg"], optimizer.state[third]["exp_avg"].view(-1)
    for param in params_of(optimizer):
        optimizer.state[param]
    known = [params_of(plain)[number] for number in (0, 2, 5)]
    expected = plain.state[known[0]], plain.state[known[1]]["exp_avg"], plain.state[known[2]]["exp_avg"].view(-1)
    assert_equal(held, expected)
    assert_equal(next(iter(optimizer.state.items()))[1], plain.state[known[0]])
    assert_equal(dict(optimizer.state)[second], plain.state[known[1]])


def put_in(optimizer, tmp_path):
    """As of a checkpoint that is read for one parameter after the other."""
    plain = trained(5)
    torch.save([plain.state[param] for param in params_of(plain)], tmp_path / "state")
    largest = max(optimizer.state.nbytes_of(param) for param in params_of(optimizer))
    for param, state in zip(params_of(optimizer), torch.load(tmp_path / "state"), strict=True):
        optimizer.state[param] = {name: value.clone() for name, value in state.items()}
        assert in_memory(optimizer) <= streamed_state.ASKED_BYTES + largest
    for param, known in zip(params_of(optimizer), params_of(plain), strict=True):
        param.data.copy_(known.data)
    for each in (optimizer, plain):
        run(each, 2, 5)
    assert_equal(everything(optimizer), everything(plain))


def moved(tmp_path):
    optimizer = trained()
    mover = make_mover(optimizer, "direct", tmp_path)
    assert in_memory(optimizer) == 0
    return optimizer, mover


SCENARIOS = [ask_for_all, hold_some, put_in]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_leaves_unless_it_is_held(scenario, tmp_path):
    optimizer, mover = moved(tmp_path)
    before = everything(optimizer)
    scenario(optimizer, tmp_path)
    if scenario is not put_in:
        assert_equal(everything(optimizer), before)
        run(optimizer, 2, 3)
        assert in_memory(optimizer) == 0 or scenario is hold_some
        assert_equal(everything(optimizer), everything(trained(5)))
    mover.close()
    assert type(optimizer.state) is not streamed_state.StreamedState


GUARDS = {
    "a dictionary that is held stays": ("is_held", lambda *_: False, hold_some),
    "what is not held leaves": ("is_held", lambda *_: True, ask_for_all),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    name, left_out, scenario = GUARDS[guard]
    optimizer, _ = moved(tmp_path)
    monkeypatch.setattr(streamed_state, name, left_out)
    with pytest.raises(AssertionError):
        scenario(optimizer, tmp_path)
