"""Ctrl-C at any line of this package: afterwards each parameter and its state are as before the step or as after it.

A trace function raises KeyboardInterrupt at the n-th line that runs in `offload`; n goes over the whole call.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from optimizer_state.users_rig import On, loss_of, make_model

import offload

PACKAGE = str(Path(offload.__file__).parent)
CALLS = {
    "step": lambda optimizer, on, loaded: optimizer.step(),
    "state_dict": lambda optimizer, on, loaded: optimizer.state_dict(),
    "load_state_dict": lambda optimizer, on, loaded: optimizer.load_state_dict(loaded),
    "load_state_dict, other dtype": lambda optimizer, on, loaded: optimizer.load_state_dict(with_doubles(loaded)),
    "read": lambda optimizer, on, loaded: list(optimizer.state.values()),
    "disable": lambda optimizer, on, loaded: on.handles[0].disable(),
}


def with_doubles(loaded):
    """A state dict that has to be converted."""
    state = {key: {name: value.double() for name, value in each.items()} for key, each in loaded["state"].items()}
    return {**loaded, "state": state}


PRIME = 13  # so that a coarse walk over the lines meets other ones of a loop each time


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the package."""

    def __init__(self, number):
        self.left = number

    def calls(self, frame, event, _):
        return self.lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    def lines(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.lines


def prepared(on):
    """The third step is about to begin."""
    torch.set_grad_enabled(True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    on(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if number < 2:
            optimizer.step()
    return model, optimizer


def parts(model, optimizer):
    """What belongs to each parameter."""
    state = optimizer.state_dict()["state"]
    return [
        [p.detach().clone(), *(value.clone() for value in state[n].values())] for n, p in enumerate(model.parameters())
    ]


def is_same(one, other):
    return all(map(torch.equal, one, other))


ROWS = [
    pytest.param(each, marks=pytest.mark.long) if each in ("state_dict", "load_state_dict") else each for each in CALLS
]


@pytest.mark.parametrize("call", ROWS)
@pytest.mark.parametrize("stride", [29 * PRIME, pytest.param(PRIME, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(call, stride, tmp_path):
    model, optimizer = prepared(On(False, tmp_path))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    before = parts(model, optimizer)
    optimizer.step()
    after = parts(model, optimizer)
    number, interrupted = 1, 0
    while number is not None:
        on = On(True, tmp_path)
        model, optimizer = prepared(on)
        loaded = copy.deepcopy(checkpoint)  # after an interrupt a step may write to it, as in plain torch
        trace = Interrupt(number)
        sys.settrace(trace.calls)
        try:
            CALLS[call](optimizer, on, loaded)
            number = None  # it has ended before
        except KeyboardInterrupt:
            interrupted += 1
            number += stride if call == "step" else PRIME
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        for parameter, was, will_be, found in zip(
            model.parameters(), before, after, parts(model, optimizer), strict=True
        ):
            assert is_same(found, was) or (call == "step" and is_same(found, will_be)), (number, interrupted)
            if is_same(found, will_be):
                parameter.grad = None
        optimizer.step()  # the rest of it
        assert all(map(is_same, parts(model, optimizer), after))
        on.off()
        assert not any(value.isnan().any() for state in loaded["state"].values() for value in state.values())
    assert interrupted > 2
