"""`disable` after Ctrl-C in the very first update in backward: no gradient is gone yet that tells of the begun step."""

import copy
import sys

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.test_interrupts import PRIME, Interrupt, is_same, parts
from optimizer_state.users_rig import On, everything, loss_of, make_model, train
from torch.optim import AdamW

from offload.optimizer_state import begun_step


def prepared(on):
    torch.set_grad_enabled(True)
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    on(model, optimizer)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    return model, optimizer


class Interrupted(begun_step.ChunkedStep):
    """Its first update is interrupted when it has been made."""

    def run(self, chunk):
        super().run(chunk)
        raise KeyboardInterrupt


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A model and its optimizer, interrupted and disabled."""
    on = On(True, tmp_path, step_in_backward=True)
    model, optimizer = prepared(on)
    with monkeypatch.context() as patch:
        patch.setattr(begun_step, "ChunkedStep", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 2).backward()
    on.off()
    assert sum(p.grad is not None for p in model.parameters()) == 1
    return model, optimizer


def test_step_updates_nothing_twice(interrupted):
    model, optimizer = interrupted
    updated = everything(model, optimizer)
    optimizer.step()
    assert_equal(everything(model, optimizer), updated)


def test_the_guard_left_out_is_noticed(interrupted, monkeypatch):
    model, optimizer = interrupted
    updated = everything(model, optimizer)
    monkeypatch.setattr(begun_step.BegunStep, "has_interrupted_gradient", False)
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_equal(everything(model, optimizer), updated)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_next_gradients_are_used(set_to_none, interrupted):
    model, optimizer = interrupted
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    plain = AdamW(twin.parameters(), lr=0.01)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad(set_to_none=set_to_none)
    for each in (twin, model):
        loss_of(each, 3).backward()
    for each in (plain, optimizer):
        each.step()
    assert_equal(everything(model, optimizer), everything(twin, plain))


def test_an_interrupt_at_any_line_of_the_first_update(tmp_path):
    model, optimizer = prepared(On(False, tmp_path))
    before = parts(model, optimizer)
    loss_of(model, 2).backward()
    optimizer.step()
    after = parts(model, optimizer)
    number, updated = 1, 0
    while updated < 2:  # until the first parameter's update is over
        on = On(True, tmp_path, step_in_backward=True)
        model, optimizer = prepared(on)
        loss = loss_of(model, 2)
        trace = Interrupt(number)
        sys.settrace(trace.calls)
        try:
            loss.backward()
        except KeyboardInterrupt:
            number += PRIME
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        on.off()
        optimizer.step()
        found = parts(model, optimizer)
        for was, will_be, now in zip(before, after, found, strict=True):
            assert is_same(now, was) or is_same(now, will_be), number
        updated = sum(map(is_same, found, after))
    assert number > 5 * PRIME
