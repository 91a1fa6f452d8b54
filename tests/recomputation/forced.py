"""Steps in which everything that has a recipe is dropped, beside plain ones.

`Forced` stands in for a session's controller: the first step of a signature is recorded, the second is the trial, and
every later one drops all that verified. A comparison in which nothing was recomputed fails.
"""

import copy
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

import offload
from offload.profiling.profiler import Recorder
from offload.profiling.recipe_trial import RecipeTrial
from offload.runtime.executor import ScheduleExecutor
from offload.runtime.schedule import manual_schedule
from offload.runtime.weak import weak_callback


class Forced:
    """Drops everything that has a recipe, and swaps or keeps the rest."""

    def __init__(self, on_device, swaps=False, wanted=lambda index, recipe: True, limit=None):
        self._engine, self._counts = on_device.engine, on_device.counts
        self.swaps, self.wanted, self.limit = swaps, wanted, limit
        self.known = {}
        self.trials = {}
        self.schedules = {}
        self.deviated = []

    def observer(self, signature, model):
        known = self.known.get(signature)
        if known is None or not known.finished:
            known = self.known[signature] = Recorder()
            return known
        trial = self.trials.get(signature)
        if trial is None:
            trial = self.trials[signature] = RecipeTrial(self._engine, known.order, **(self.limit or {}))
            return trial
        if signature not in self.schedules:
            assert trial.finished
            self.schedules[signature] = self.schedule(known.order, trial)
        deviate = partial(weak_callback(self.forget), signature)
        return ScheduleExecutor(self.schedules[signature], self._engine, self._counts, "kept", deviate)

    def schedule(self, order, trial):
        recipes = {i: recipe for i, recipe in trial.recipes().items() if self.wanted(i, recipe)}
        schedule = manual_schedule(order, -1 if self.swaps else 0, 2)
        return replace(
            schedule,
            swapped=schedule.swapped - recipes.keys(),
            prefetches=tuple(row for row in schedule.prefetches if row[2] not in recipes),
            recomputed=frozenset(recipes),
            recipes=recipes,
        )

    def forget(self, signature):
        self.deviated.append(signature)

    def needs_hooks(self, signature):
        return True

    def end_finished_profiles(self):
        pass

    def end_profiles(self):
        pass


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def state_of(model):
    return [*gradients(model), *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), number
            # Bits: NaN equals NaN, and no zero equals another.
            bits = [each.detach().contiguous().view(torch.uint8) if each.dim() else each.detach() for each in (a, b)]
            assert torch.equal(*bits), f"{number}: {(a != b).sum().item()} of {a.numel()} elements differ"


class Forcing:
    """Compares steps of a model with those of its copy, from which everything is dropped that can be."""

    def __init__(self, spill_dir):
        self.spill_dir = spill_dir
        self.handles = []

    def enable(self, model, *, min_tensor_bytes=256, n_tensors=-1, **forced):
        handle = offload.enable(
            model, n_tensors=n_tensors, lb=2, min_tensor_bytes=min_tensor_bytes, spill_dir=self.spill_dir
        )
        handle._on_device.controller = Forced(handle._on_device, **forced)
        self.handles.append(handle)
        return handle

    def compare(self, make, step, steps=6, recomputes=True, **options):
        """`step(model, number)` returns tensors that have to be the same, from the same seed, in each of the steps."""
        plain = make()
        dropping = copy.deepcopy(plain)
        handle = self.enable(dropping, **options)
        for number in range(steps):
            results = []
            for model in (plain, dropping):
                torch.manual_seed(number)
                results.append([*step(model, number), torch.get_rng_state()])
            assert_same(results[1], results[0])
        if recomputes is not None:
            assert (handle._counts.recomputed.tensors > 0) == recomputes, self.refused(handle)
        return handle

    @staticmethod
    def operators(handle):
        trials = handle._on_device.controller.trials.values()
        return {name for trial in trials for recipe in trial.recipes().values() for name in recipe.operators}

    @staticmethod
    def refused(handle):
        trials = handle._on_device.controller.trials.values()
        return {text for trial in trials for text in trial.refusals().values()}


class Calls(nn.Module):
    """Two layers around any function."""

    def __init__(self, function, width=64):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


def plain_step(model, number, width=64):
    model.zero_grad()
    model(torch.randn(32, width)).square().mean().backward()
    return gradients(model)


def silu_twice(h):
    return functional.silu(functional.gelu(h) * torch.sigmoid(h))


def made(function=silu_twice):
    return lambda: Calls(function)
