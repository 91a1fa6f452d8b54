"""A signal handler that reads all weights and state, as one that writes a checkpoint does, at any line of this package.

It finds a value that each tensor has before or after the interrupted call, and changes no result.
"""

import pytest
import torch
from each_line import AtLine, times
from parameters.frozen_rig import Model, assert_equal, enable, loss_of, make_model
from parameters.trained_rig import Looks, Run

WAYS = ["in backward, state", "gradients"]  # together they have all the ways of an update


class Trained(Run):
    """One step of training has ended."""

    network = Model

    def __init__(self, folder=None, way="in backward"):
        knobs = {"optimizer_state": True, "gradients": True} if way == "gradients" else {}
        super().__init__(folder, "alone" if way == "gradients" else way, self.network, n_tensors=0, **knobs)
        self.train(1)


class SavedItself(Trained):
    """A model with a product, which saves the parameter itself."""

    network = Looks


class Frozen:
    """A model whose first forward and backward have ended."""

    def __init__(self, folder=None, way=""):
        self.model = make_model()
        self.handle = enable(self.model, folder) if folder is not None else None
        loss_of(self.model, 0).backward()
        self.model.zero_grad()

    def train(self, *_):
        loss_of(self.model, 0).backward()
        self.model.zero_grad()

    def everything(self):
        return [parameter.detach().clone() for parameter in self.model.state_dict().values()]


def write(run):
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(2)


CALLS = {
    "step": lambda run: run.train(1, 1),
    "write": write,
    "read": lambda run: [parameter.sum() for parameter in run.model.parameters()],
    "state_dict": lambda run: run.everything(),
    "disable": lambda run: run.handle and run.handle.disable(),
}


def reads(run):
    found = [*(each.clone() for each in run.everything()), *(each.detach().clone() for each in run.model.parameters())]
    dirt = [torch.full(each.shape, float("nan")) for each in found for _ in range(2)]  # in memory that was just freed
    del dirt
    return found


def is_a_value(found, known):
    return any(torch.equal(found, each) for each in known)


def at_any_line(kind, call, way, folder, times_per_line, under="", function=None):
    plain = kind(None, way)
    before = reads(plain)
    CALLS[call](plain)
    after = reads(plain)
    run, line = kind(folder, way), AtLine()
    with line:
        CALLS[call](run)
    run.handle.disable()
    tried = acted = 0
    for place, nth in times(line.counts, times_per_line, under, function):
        run, found = kind(folder, way), []
        line = AtLine(place, nth, lambda run=run, found=found: found.extend(reads(run)))
        with line:
            CALLS[call](run)
        acted += line.acted
        tried += 1
        if line.acted:
            assert len(found) == len(before) == len(after)
            assert all(map(is_a_value, found, zip(before, after, strict=True))), (place, nth)
        assert all(map(torch.equal, reads(run), after)), (place, nth)
        run.handle.disable()
        assert_equal(reads(run), after)
    assert acted > max(2, tried // 2)  # how often a line runs depends on the speed of copies


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.full
def test_trained_parameters_and_their_state(call, way, tmp_path):
    at_any_line(Trained, call, way, tmp_path, 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.full
def test_frozen_parameters(call, tmp_path):
    at_any_line(Frozen, call, "", tmp_path, 1)


@pytest.mark.parametrize("kind", [Trained, Frozen])
def test_lines_that_end_moving(kind, tmp_path):
    at_any_line(kind, "disable", "in backward", tmp_path, 1, "parameters")


@pytest.mark.parametrize("function", ["view", "current", "needed_in_backward", "settle", "put_away", "bring"])
def test_lines_that_move_parameters(function, tmp_path):
    kind = SavedItself if function == "current" else Trained
    times_per_line = 3 if function in ("view", "current") else 1
    at_any_line(kind, "step", "in backward", tmp_path, times_per_line, "parameters", function)
