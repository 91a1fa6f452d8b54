"""What tests of the trial step share: a small model, and trials that claim recipes."""

import time

import torch
from torch import nn

from offload.control.trial import TimedTrial
from offload.plan import Link
from offload.recomputation.measured import MeasuredRecipe

# With the slow one, copies take longer than the computation of a machine that other programs slow down.
FAST, SLOW = Link(1e12, 1e12, 0.0), Link(1e6, 1e6, 0.0)
SMALLEST = "4KiB"


class KnownTrial(TimedTrial):
    """Stands in for a trial: claims a recipe for every entry but some."""

    def __init__(
        self, engine, order, trace, limit_bytes,
        seconds=1e-6, heavy=(), refused=None, differs=False, unpack_seconds=0.0,
    ):  # fmt: skip
        super().__init__(engine, order, trace, limit_bytes)
        self.unpack_seconds = unpack_seconds
        self.order, self.limit_bytes = order, limit_bytes
        self.seconds, self.heavy, self.refused, self.differs = seconds, heavy, refused or {}, differs

    def unpacking(self, pack_index):
        super().unpacking(pack_index)
        time.sleep(self.unpack_seconds)

    @property
    def is_as_recorded(self):
        return not self.differs and super().is_as_recorded

    def recipes(self):
        return {
            index: MeasuredRecipe(self.seconds, frozenset(), ("aten.gelu",), index in self.heavy)
            for index in self.order.entries
            if index not in self.refused
        }

    def refusals(self):
        return self.refused


def begun_trials(monkeypatch):
    """The trials that have begun; `about` is what the next ones are given."""
    begun = Begun()
    monkeypatch.setattr("offload.handle.make_trial", begun.make)
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: begun.link)
    return begun


class Begun(list):
    def __init__(self):
        self.about, self.link, self.answer = {}, SLOW, None

    def make(self, engine, order, trace, limit_bytes):
        if self.answer is not None:
            return self.answer
        self.append(KnownTrial(engine, order, trace, limit_bytes, **self.about))
        return self[-1]


def make():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])


def train(model, steps, rows=512):
    results = []
    for number in range(steps):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        model(x).square().mean().backward()
        results += [parameter.grad.clone() for parameter in model.parameters()]
    return results
