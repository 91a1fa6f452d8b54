"""Ctrl-C while the hooks of an optimizer are removed: those that are left do nothing."""

import copy

import pytest
import torch
from torch import nn

from offload.optimizer_state.in_backward import StepInBackward


class Interrupts:
    """Stands among the hooks."""

    def remove(self):
        raise KeyboardInterrupt


def trained(model, optimizer):
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_steps_after_an_interrupted_close_are_torchs():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    in_backward = StepInBackward(optimizer, str)
    in_backward._hooks.insert(1, Interrupts())
    with pytest.raises(KeyboardInterrupt):
        in_backward.close()
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    assert all(map(torch.equal, trained(model, optimizer), expected))


def test_hooks_that_go_on_are_noticed(monkeypatch):
    """A mutant: closed and open are the same."""
    monkeypatch.setattr(StepInBackward, "_is_open", property(lambda self: True, lambda self, _: None), raising=False)
    with pytest.raises(RuntimeError, match="step_in_backward"):
        test_steps_after_an_interrupted_close_are_torchs()
