"""Tensors that the schedule swaps: no Python code runs for them; what differs from the recorded step is noticed."""

from dataclasses import replace

import pytest
import torch
from python_frames import frames_of
from torch import nn

import offload
from offload.control.limits import LIMITS

NUMEL = 1 << 14


class Save(torch.autograd.Function):
    """The identity, which saves another tensor for backward, and keeps what comes back."""

    @staticmethod
    def forward(ctx, x, saved, back):
        ctx.save_for_backward(saved)
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        if ctx.back is not None:
            ctx.back.append(saved.clone())
        return grad, None, None


class Saver(nn.Module):
    def __init__(self, count, numel=NUMEL):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, NUMEL))
        self.numbers = range(count)
        self.register_buffer("table", torch.linspace(0, 1, NUMEL))
        self.scale = nn.Parameter(torch.ones(1))
        self.make = self.usual
        self.numel = numel
        self.notes = True

    def usual(self, number):
        return (self.scale + number).expand(self.numel).clone()  # requires a gradient, as activations do

    def forward(self, x):
        self.back = [] if self.notes else None
        for number in self.numbers:
            x = Save.apply(x, self.make(number), self.back)
        return x


def step(model, settle=lambda: None):
    x = torch.zeros(1, requires_grad=True)
    y = model(x)
    settle()
    y.sum().backward()
    return model.back


@pytest.mark.only_cpu("on an accelerator Python asks for the stream")
@pytest.mark.parametrize("knobs", [{"n_tensors": -1, "lb": 3}, {"max_slowdown": 1000.0}], ids=["hand", "plan"])
def test_a_swapped_tensor_runs_no_python(knobs, tmp_path):
    frames = {}
    for count in (16, 32):
        model = Saver(count, 1 << 18)
        model.notes = False
        handle = offload.enable(model, min_tensor_bytes=1024, spill_dir=tmp_path, **knobs)
        handle._controller._limits = replace(LIMITS, replans=0)  # nodes that compute nothing are never as planned
        for _ in range(6):
            step(model)
        before = handle.report().swapped.tensors
        frames[count] = frames_of(lambda model=model: step(model))
        assert handle.report().swapped.tensors - before > count // 2
        handle.disable()
    more = len(frames[32]) - len(frames[16])
    assert more < 16, f"16 more tensors ran {more} more functions: {sorted(set(frames[32]))}"


def compare(offloaded, change):
    """Four steps alike, then two with `change`; the report and the number of schedules after the first of them."""
    found = []

    def run(model, step_, settle):
        results = []
        for _ in range(4):
            results += step(model, settle)
        change(model)
        results += step(model, settle)
        if offloaded.handles:
            found.append((offloaded.handles[-1].report(), len(offloaded.handles[-1]._controller.schedules)))
        results += step(model, settle)
        return results

    offloaded.compare(run, make=lambda: Saver(6), n_tensors=-1)
    return found


@pytest.mark.parametrize("which", ["weight", "table"])
def test_what_the_model_holds_stays_at_the_place_of_a_swapped_tensor(which, offloaded):
    def change(model):
        model.make = lambda number: getattr(model, which).view(-1) if number == 3 else model.usual(number)

    ((report, _),) = compare(offloaded, change)
    assert report.kept["parameter"].tensors == 1
    assert report.kept["parameter"].nbytes == 4 * NUMEL


def test_another_size_at_the_place_of_a_swapped_tensor_ends_the_schedule(offloaded):
    def change(model):
        model.make = lambda number: model.usual(number)[: NUMEL // 2].clone() if number == 3 else model.usual(number)

    ((_, schedules),) = compare(offloaded, change)
    assert schedules == 0


def test_a_leaf_at_the_place_of_a_swapped_tensor_stays(offloaded):
    leaf = torch.ones(NUMEL, requires_grad=True)

    def change(model):
        model.make = lambda number: leaf if number == 3 else model.usual(number)

    ((report, schedules),) = compare(offloaded, change)
    assert report.kept["leaf"].tensors == 1
    assert schedules == 1


def test_the_same_storage_twice_is_copied_once(offloaded):
    def change(model):
        shared = torch.arange(NUMEL, dtype=torch.float32)
        model.make = lambda number: shared if number in (2, 3) else model.usual(number)

    compare(offloaded, change)


def test_a_write_between_pack_and_unpack_is_the_usual_error(offloaded):
    seen = []

    def run(model, step_, settle):
        for _ in range(3):
            step(model, settle)
        made = [model.usual(number) for number in model.numbers]
        model.make = made.__getitem__
        x = torch.zeros(1, requires_grad=True)
        y = model(x)
        settle()
        made[2].add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            seen.append(str(error))
        return model.back

    offloaded.compare(run, make=lambda: Saver(6), n_tensors=-1)
    assert len(seen) == 2
    assert all("modified by an inplace operation" in text for text in seen)
