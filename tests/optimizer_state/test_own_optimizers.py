"""Optimizers of one's own: what they count and share is as without offload, stepped in chunks or as a whole."""

import copy
import functools
import itertools
import logging
import random
import re
import types
import weakref
from enum import Enum
from pathlib import PurePath
from random import gauss

import numpy as np
import pytest
import torch
from numpy.random import rand
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


class CountsInAHelper(Momentum):
    def extra(self):
        count_one_more()


def count_one_more():
    count_in_the_module()


def count_in_the_module():
    MODULE["steps"] += 1


class Scales(Momentum):
    """Divides the gradients by the number of the step. What counts the steps begins anew in each training."""

    @classmethod
    def begin(cls):
        pass

    def extra(self):
        number = self.number()
        for parameter in self.with_gradient:
            parameter.grad.div_(number)


class CountsWithAnIterator(Scales):
    @classmethod
    def begin(cls):
        cls.numbers = itertools.count(1)

    def number(self):
        return next(self.numbers)


class CountsInAStaticMethod(Scales):
    @classmethod
    def begin(cls):
        global COUNT
        COUNT = itertools.count(1)

    @staticmethod
    def number():
        return next(COUNT)


class CountsInAProperty(CountsInAStaticMethod):
    @property
    def next_number(self):
        return next(COUNT)

    def number(self):
        return self.next_number


class CountsWithAMethod(Scales):
    @classmethod
    def begin(cls):
        global ONE_MORE
        ONE_MORE = itertools.count(1).__next__

    def number(self):
        return ONE_MORE()


class CountsInAnObject(Scales):
    @classmethod
    def begin(cls):
        cls.counter = types.SimpleNamespace(number=0)

    def number(self):
        self.counter.number += 1
        return self.counter.number


class CountsBesideAFunction(Scales):
    @classmethod
    def begin(cls):
        cls.table = {"norm": torch.norm, "number": 0}

    def number(self):
        self.table["number"] += 1
        return self.table["number"]


class CountsInALargeTensor(Scales):
    @classmethod
    def begin(cls):
        cls.numbers = torch.zeros(100)

    def number(self):
        self.numbers += 1
        return self.numbers[0]


class UsesWhatDoesNotChange(Scales):
    color = Enum("color", "RED")
    log = logging.getLogger("offload.test")
    pattern, path, single = re.compile("a"), PurePath("a"), np.float32(1)
    table = {"norm": torch.norm, "kinds": (torch.nn.Linear, int | None)}  # noqa: RUF012
    values = torch.arange(256)
    one_more = staticmethod(functools.partial(int, 1))

    @functools.cached_property
    def named(self):
        return self.pattern.match("a")

    def number(self):
        self.table["norm"](self.values.float())
        warn("%s", gauss)
        return self.one_more()


warn = logging.getLogger("offload.test").debug


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


class DrawsWithAGeneratorOfItsClass(DrawsFromPython):
    @classmethod
    def begin(cls):
        cls.generator = random.Random(0)

    def draw(self):
        return self.generator.random()


class DrawsWithAMethod(DrawsFromPython):
    def draw(self):
        return rand()


class DrawsInVain(DrawsFromPython):
    """Its updates do not depend on the number. In chunks it would draw more of them."""

    likelihood = 1


class DrawsInVainFromNumPy(DrawsFromNumPy):
    likelihood = 1


OWN = [CountsInClass, CountsInAListOfItsClass, CountsInItsModule, CountsInAGlobal, AddsToItsClass, KeepsNorms]
OWN += [CountsInATensor, CountsInTheState, CountsInItself, HasADel, CountsInstances, NeedsLargeParameters]
OWN += [NormOfBiases, SharesATensor, UsesAListThatContainsItself]
OWN += [
    CountsInAStaticMethod,
    CountsInAProperty,
    CountsInAHelper,
    CountsWithAnIterator,
    CountsWithAMethod,
    CountsInAnObject,
    CountsBesideAFunction,
]
OWN += [CountsInALargeTensor, UsesWhatDoesNotChange, DrawsWithAGeneratorOfItsClass, DrawsWithAMethod]
OWN += [DrawsFromPython, DrawsFromNumPy, DrawsFromTorch, DrawsInVain, DrawsInVainFromNumPy]
CHUNKED = {CountsInItself, CountsInstances, UsesWhatDoesNotChange}


def trained_with(on, kind):
    if "latest" in vars(kind):
        del kind.latest
    before = counted(kind)
    model = make_model()
    getattr(kind, "begin", int)()
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
    getattr(kind, "begin", int)()
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
