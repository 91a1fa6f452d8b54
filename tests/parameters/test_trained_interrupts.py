"""Ctrl-C at any line of this package, errors in the middle of a step: each parameter has one of its true values."""

import copy
import sys

import pytest
import torch
from parameters.frozen_rig import assert_equal, loss_of
from parameters.test_frozen_interrupts import PRIME, AtLine, interrupt
from parameters.trained_rig import Run, assert_same

from offload.optimizer_state.freed_gradient import StepInBackwardError


def clip(run):
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(2)


CALLS = {
    "step": lambda run: run.train(1, 1),
    "write": clip,
    "read": lambda run: [parameter.sum() for parameter in run.model.parameters()],
    "state_dict": lambda run: run.everything(),
    "disable": lambda run: run.handle.disable(),
}


def walk(call, way, stride, act, folder):
    """Yield a run after each call in which `act` was called at another line."""
    number = 1
    while True:
        torch.set_grad_enabled(True)
        run = Run(folder, way, n_tensors=0)
        run.train(1)
        acted = []
        trace = AtLine(number, lambda run=run, acted=acted: (acted.append(1), act(run)))
        sys.settrace(trace.calls)
        try:
            CALLS[call](run)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        yield run
        run.handle.disable()
        if not acted:
            return
        number += stride * (6 if call == "step" else 1)


def weights(run):
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def values_of(call):
    """What parameters may be: as before the call, or as after it."""
    plain = Run()
    plain.train(1)
    before = weights(plain), plain.everything(), {k: v.clone() for k, v in plain.model.state_dict().items()}
    saved = copy.deepcopy(plain.optimizer.state_dict())
    if call in ("step", "write"):
        CALLS[call](plain)
    after = weights(plain)
    resumed = Run()
    resumed.model.load_state_dict(before[2])
    resumed.optimizer.load_state_dict(copy.deepcopy(saved))
    expected = resumed.train(2, 5)
    return before, after, saved, expected, resumed


@pytest.mark.parametrize("way", ["in backward, state", "chunks"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stride", [211 * PRIME, pytest.param(PRIME, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(call, way, stride, tmp_path):
    before, after, saved, expected, resumed = values_of(call)
    count = 0
    for run in walk(call, way, stride, lambda run: interrupt(), tmp_path):
        count += 1
        for found, *known in zip(weights(run), before[0], after, strict=True):
            assert any(torch.equal(found, each) for each in known)
        run.model.load_state_dict(before[2])
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        run.optimizer.zero_grad()
        run.gradients.clear()
        run.model.train()
        assert_equal(run.train(2, 5), expected)
        assert_same(run, resumed)
    assert count > 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["in backward", "chunks"])
def test_an_error_in_the_middle_of_a_step(error, where, way, tmp_path):
    moved, plain = Run(tmp_path, way), Run()

    def fail(*_):
        raise error

    for run in (moved, plain):
        torch.manual_seed(0)
        layer = run.model.blocks[1].out.layer
        hook = layer.register_forward_hook(fail) if where == "forward" else layer.register_full_backward_hook(fail)
        with pytest.raises(error):
            loss_of(run.model, 0).backward()
        hook.remove()
        run.optimizer.step()  # those that backward has reached
        run.optimizer.zero_grad()
        run.gradients.clear()
    assert_same(moved, plain)
    assert_equal(moved.train(3), plain.train(3))
    moved.handle.disable()
    assert_same(moved, plain)


def test_a_backward_again_after_an_update_is_refused(tmp_path):
    run = Run(tmp_path)
    loss = loss_of(run.model.eval(), 0)
    loss.backward(retain_graph=True)
    with pytest.raises((StepInBackwardError, RuntimeError), match=r"already updated|modified by an inplace operation"):
        loss.backward()
