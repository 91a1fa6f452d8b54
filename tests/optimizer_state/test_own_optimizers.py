"""Optimizers of one's own: what they count and share is as without offload, stepped in chunks or as a whole."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import Momentum, On, both, everything, make_model, train


class CountsInClass(Momentum):
    steps = 0

    def extra(self):
        type(self).steps += 1


class CountsInAListOfItsClass(Momentum):
    norms = []  # noqa: RUF012

    def extra(self):
        self.norms.append(len(self.with_gradient))


class CountsInItsModule(Momentum):
    def extra(self):
        MODULE["steps"] += 1


MODULE = {"steps": 0}


class CountsInAGlobal(Momentum):
    def extra(self):
        global NUMBER
        NUMBER += 1


NUMBER = 0


class AddsToItsClass(Momentum):
    def extra(self):
        type(self).latest = len(self.with_gradient)


class KeepsNorms(Momentum):
    def prepare(self):
        self._norms = []

    def extra(self):
        self._norms.append(len(self.with_gradient))


class CountsInATensor(Momentum):
    def prepare(self):
        self._steps = torch.zeros(())

    def extra(self):
        self._steps += 1


class CountsInTheState(Momentum):
    def extra(self):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class CountsInItself(Momentum):
    def prepare(self):
        self.steps = 0

    def extra(self):
        self.steps += 1


class HasADel(Momentum):
    closed = 0

    def __del__(self):
        HasADel.closed += 1


class CountsInstances(Momentum):
    made = 0

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        type(self).made += 1


class NeedsLargeParameters(Momentum):
    def extra(self):
        if any(p.numel() % 10 for p in self.with_gradient):
            raise OddSizeError


class OddSizeError(Exception):
    pass


class UsesAListThatContainsItself(Momentum):
    def extra(self):
        assert ITSELF[0] is ITSELF


ITSELF = []
ITSELF.append(ITSELF)


class NormOfBiases(Momentum):
    def extra(self):
        biases = [p.grad for p in self.with_gradient if p.dim() == 1 and len(p) > 8]
        for gradient in biases:
            gradient.div_(sum(float(each.norm()) ** 2 for each in biases) ** 0.5)


class SharesATensor(Momentum):
    """One tensor under two keys of the state, and one that the optimizer has besides."""

    def prepare(self):
        self.slow = None

    def extra(self):
        params = self.param_groups[0]["params"]
        if self.slow is None:
            self.slow = torch.zeros(5000)
            for parameter in params:
                self.state[parameter]["slow"] = self.slow
        self.slow += 1


class DrawsFromPython(Momentum):
    """Draws for each step whether its gradients count."""

    likelihood = 0.5

    def extra(self):
        if self.draw() > self.likelihood:
            for parameter in self.with_gradient:
                parameter.grad.zero_()

    def draw(self):
        return random.random()


class DrawsFromNumPy(DrawsFromPython):
    def draw(self):
        return np.random.rand()


class DrawsFromTorch(DrawsFromPython):
    def draw(self):
        return torch.rand(()).item()


class DrawsInVain(DrawsFromPython):
    """Its updates do not depend on the number. In chunks it would draw more of them."""

    likelihood = 1


class DrawsInVainFromNumPy(DrawsFromNumPy):
    likelihood = 1


OWN = [CountsInClass, CountsInAListOfItsClass, CountsInItsModule, CountsInAGlobal, AddsToItsClass, KeepsNorms]
OWN += [CountsInATensor, CountsInTheState, CountsInItself, HasADel, CountsInstances, NeedsLargeParameters]
OWN += [NormOfBiases, SharesATensor, UsesAListThatContainsItself]
OWN += [DrawsFromPython, DrawsFromNumPy, DrawsFromTorch, DrawsInVain, DrawsInVainFromNumPy]
CHUNKED = {CountsInItself, CountsInstances}


def trained_with(on, kind):
    if "latest" in vars(kind):
        del kind.latest
    before = counted(kind)
    model = make_model()
    random.seed(0)
    np.random.seed(0)
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 4)
    own = {name: value for name, value in vars(optimizer).items() if name.lstrip("_") in ("norms", "steps", "slow")}
    found = everything(model, optimizer), copy.deepcopy(own)
    gone = weakref.ref(optimizer)
    del optimizer
    found = *found, random.random(), np.random.rand(), torch.rand(())
    return *found, [after - each for after, each in zip(counted(kind), before, strict=True)], gone() is None


def counted(kind):
    names = ("steps", "norms", "latest", "closed", "made")
    values = [vars(kind).get(name, 0) for name in names]
    return [MODULE["steps"], NUMBER, *(len(value) if isinstance(value, list) else value for value in values)]


@pytest.mark.parametrize("kind", OWN)
def test_optimizers_of_ones_own(kind, tmp_path):
    plain, moved, on = both(trained_with, tmp_path, kind)
    assert_equal(moved, plain)
    on.off()


@pytest.mark.parametrize("kind", OWN)
def test_which_of_them_are_stepped_in_chunks(kind, tmp_path):
    on, model = On(True, tmp_path), make_model()
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 4)
    [counts] = on.counts
    assert (counts.whole_steps == 0) == (kind in CHUNKED)
    assert counts.tensors > 0
    assert bool(counts.whole_because) == (kind not in CHUNKED)
    on.off()


def test_an_alarm_in_the_trial_is_not_lost(tmp_path):
    import signal

    class Late(Exception):
        pass

    def handler(*_):
        raise Late

    class Alarmed(Momentum):
        def extra(self):
            signal.raise_signal(signal.SIGALRM)

    on, model = On(True, tmp_path), make_model()
    optimizer = Alarmed(model.parameters())
    on(model, optimizer)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Late):
            train(model, optimizer, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    on.off()
