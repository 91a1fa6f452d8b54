"""Ctrl-C at any line of this package, errors in the middle of a step: values stay true.

A trace function acts at the n-th line that runs in `offload`; n goes over the whole call.
"""

import linecache
import sys
from pathlib import Path

import pytest
import torch
from parameters.frozen_rig import (
    assert_away,
    assert_equal,
    away,
    enable,
    everything,
    loss_of,
    make_model,
    train,
    trained,
)

import offload

PACKAGE = str(Path(offload.__file__).parent)


def write(model):
    with torch.no_grad():
        model.first.weight.mul_(1)


CALLS = {
    "step": lambda model, handle: loss_of(model, 0).backward(),
    "no hooks": lambda model, handle: loss_of(model.eval(), 0).backward(),
    "read": lambda model, handle: [parameter.sum() for parameter in model.parameters()],
    "write": lambda model, handle: write(model),
    "state_dict": lambda model, handle: model.state_dict(),
    "move": lambda model, handle: model.double().float(),
    "disable": lambda model, handle: handle.disable(),
}
PRIME = 13  # so that a coarse walk over the lines meets other ones of a loop each time


class AtLine:
    """Calls something at the n-th line of the package."""

    def __init__(self, number, act):
        self.left = number
        self.act = act

    def calls(self, frame, event, _):
        return self.lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    def lines(self, frame, event, _):
        # Python delivers no signal between the end of a `with` block and the call that leaves its context.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.act()
        return self.lines


def interrupt():
    raise KeyboardInterrupt


def walk(call, stride, act, folder):
    """Yield a model after each call in which `act` was called at another line; the handle is open or disabled."""
    number = 1
    while True:
        torch.set_grad_enabled(True)
        model = make_model()
        handle = enable(model, folder)
        loss_of(model, 0).backward()
        model.zero_grad()
        acted = []
        trace = AtLine(number, lambda model=model, acted=acted: (acted.append(1), act(model)))
        sys.settrace(trace.calls)
        try:
            CALLS[call](model, handle)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        yield model
        handle.disable()
        if not acted:
            return
        number += stride * (4 if call in ("step", "no hooks") else 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stride", [97 * PRIME, pytest.param(PRIME, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(call, stride, tmp_path):
    plain = make_model()
    before = everything(plain)
    expected = train(make_model(), 2)
    count = 0
    for model in walk(call, stride, lambda model: interrupt(), tmp_path):
        count += 1
        model.zero_grad()
        model.float().train()
        assert_equal(everything(model), before)
        assert_equal(train(model, 2), expected)
        trained_once = everything(model)
        loss_of(model, 0)
        assert_equal(everything(model), trained_once)
    assert count > 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_middle_of_a_step(error, where, tmp_path):
    plain, moved = make_model(), make_model()
    handle = enable(moved, tmp_path)

    def fail(*_):
        raise error

    for number in range(3):
        for model in (plain, moved):
            layer = model.blocks[1].out.layer
            hook = layer.register_forward_hook(fail) if where == "forward" else layer.register_full_backward_hook(fail)
            with pytest.raises(error):
                loss_of(model, number).backward()
            hook.remove()
            model.zero_grad()
    loss_of(moved, 0)
    assert_away(moved)
    assert_equal(train(moved, 3), train(plain, 3))
    handle.disable()
    assert_equal(everything(moved), everything(plain))
    assert away(moved) == []


def test_a_backward_after_the_parameter_was_written_to_is_refused(tmp_path):
    moved = make_model()
    enable(moved, tmp_path)
    loss = loss_of(moved, 0)
    with torch.no_grad():
        moved.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(parameter.grad is None for parameter in trained(moved))
