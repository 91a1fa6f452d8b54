"""Steps that follow what an earlier one has recorded: they bind what is their own, and record where they differ."""

import threading
import weakref
from functools import partial

import pytest
import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch import nn
from torch.nn import functional

from offload.recomputation.recorder import OperatorRecorder

LEARNT = 3  # recorded, tried, dropping with all operators recorded


class Numbered(Calls):
    """Calls a function that is told the number of the call."""

    count = 0

    def forward(self, x):
        self.count += 1
        return self.b(self.function(self.a(x), self.count))


@pytest.fixture
def recorded(monkeypatch):
    """Operators that were recorded rather than followed, by step."""
    found = []
    record = OperatorRecorder.record

    def counted(self, func, *rest):
        found[-1].append(str(func))
        return record(self, func, *rest)

    monkeypatch.setattr(OperatorRecorder, "record", counted)
    return found


def counted_step(recorded, model, number, step=plain_step):
    recorded.append([])
    return step(model, number)


def steps_of(recorded):
    """Of the model that drops: the plain one has no recorder."""
    return recorded[1::2]


def test_a_step_records_once(forcing, recorded):
    forcing.compare(made(), partial(counted_step, recorded))
    assert [bool(each) for each in steps_of(recorded)] == [False, True, True, False, False, False]


@pytest.mark.parametrize(
    "value",
    [
        lambda number: float(number),
        lambda number: number,
        lambda number: (0.0, -0.0)[number % 2],
        lambda number: float("nan") if number % 2 else 1.0,
    ],
    ids=["floats", "whole numbers", "signs of zero", "no numbers"],
)
def test_scalars_are_those_of_the_step(forcing, recorded, value):
    def function(h, number):
        return functional.gelu(h) * value(number) + h.sin()

    handle = forcing.compare(lambda: Numbered(function), partial(counted_step, recorded), steps=8)
    assert not any(steps_of(recorded)[LEARNT:])
    assert handle._counts.recomputed.tensors >= 6


def rolled(h, number):
    return functional.gelu(torch.roll(h.sin(), [number, 2 * number], [0, 1])) * torch.cat((h, h.cos()), 1)[:, 256:]


def test_shapes_and_lists_are_those_of_the_step(forcing, recorded):
    forcing.compare(lambda: Numbered(rolled), partial(counted_step, recorded), steps=8)
    assert not any(steps_of(recorded)[LEARNT:])


def test_shapes_and_lists_are_those_of_the_step_alone(forcing):
    forcing.compare(lambda: Numbered(rolled), plain_step, steps=8)


def test_signs_of_zero(forcing):
    """The arc tangent tells them apart."""

    def function(h, number):
        zeros = h.abs() * (0.0, -0.0)[number % 2]
        return torch.atan2(zeros, torch.full_like(h, -1)).exp() * h

    forcing.compare(lambda: Numbered(function), plain_step, steps=8)


def step_with_and_without_onednn(model, number):
    with torch.backends.mkldnn.flags(enabled=number % 2 == 0):
        model.zero_grad()
        loss = model(torch.randn(4, 3, 16, 16)).square().mean()
    loss.backward()
    return gradients(model)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.SiLU(), nn.Conv2d(16, 4, 3))


def test_settings_are_those_of_the_step(forcing, recorded):
    step = partial(counted_step, recorded, step=step_with_and_without_onednn)
    forcing.compare(convolutions, step, steps=8)
    assert not any(steps_of(recorded)[LEARNT:])


def test_settings_are_those_of_the_step_alone(forcing):
    forcing.compare(convolutions, step_with_and_without_onednn, steps=8)


def test_another_operator_in_the_same_place(forcing):
    def function(h, number):
        h = functional.gelu(h)
        return functional.silu(torch.sin(h) if number % 4 else torch.cos(h))

    forcing.compare(lambda: Numbered(function), plain_step, steps=10)


def test_other_operators_are_recorded(forcing, recorded):
    """At the second of two; the third step is the template."""

    def function(h, number):
        h = functional.gelu(h)
        return functional.silu(h * 2) if number < 6 else torch.tanh(functional.silu(h + 2))

    forcing.compare(lambda: Numbered(function), partial(counted_step, recorded), steps=10)
    counts = [bool(each) for each in steps_of(recorded)]
    assert counts[LEARNT:5] == [False, False]
    assert counts[5]


def test_arguments_in_another_order(forcing):
    """The same operators, and the same tensors."""

    def function(h, number):
        a, b = h.sin(), h.cos()
        return functional.silu(a - b if number % 4 else b - a)

    forcing.compare(lambda: Numbered(function), plain_step, steps=10)


def test_tensors_seen_otherwise(forcing):
    def function(h, number):
        h = functional.gelu(h[:, :32])
        return functional.silu(h if number % 4 else h.t()).repeat(1, 8)

    forcing.compare(lambda: Numbered(function), plain_step, steps=10)


def test_a_change_in_place_by_an_operator_that_no_recipe_needs(forcing):
    """Of a tensor aside, or of one that a recipe reads: the operators are the same."""

    def function(h, number):
        h = functional.gelu(h).sin()
        aside = torch.zeros_like(h)
        with torch.no_grad():
            (aside if number % 4 else h).add_(1)
        return functional.silu(h + 1)

    forcing.compare(lambda: Numbered(function), plain_step, steps=10)


def test_a_weight_that_autograd_does_not_save_in_this_step(forcing):
    """Plain torch lets it change before backward then."""

    class Detached(Calls):
        count = 0

        def forward(self, x):
            self.count += 1
            x = x * 2
            return self.b(functional.gelu(self.a(x if self.count != 5 else x.detach())))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 128, requires_grad=True)).square().mean()
        if model.count == 5:
            with torch.no_grad():
                model.a.weight.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(lambda: Detached(None, width=128), step, steps=8)


def test_a_weight_in_whose_place_another_tensor_is_saved(forcing):
    """So that the step saves as many tensors of the same sizes as the recorded one, but not the weight."""

    class Other(Calls):
        def __init__(self):
            super().__init__(None, width=256)
            self.w, self.t = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256, 256))
            self.count = 0

        def forward(self, x):
            self.count += 1
            is_other = self.count == 6
            x = self.b(self.a(x)) * 2
            shift = self.t * torch.randn(256, 256, requires_grad=is_other)
            h = torch.mm(x.detach() if is_other else x, self.w)
            return functional.silu(h) + shift.sum()

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(256, 256)).square().mean()
        if model.count == 6:
            with torch.no_grad():
                model.w.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(Other, step, steps=8)


def test_a_tensor_that_was_not_dropped_before(forcing):
    """Branches by turns: the template is given up, and every step records as before."""

    def function(h, number):
        return silu_twice(h) if number % 2 else torch.tanh(functional.gelu(h) * 3)

    handle = forcing.compare(lambda: Numbered(function), plain_step, steps=16)
    (schedule,) = handle._on_device.controller.schedules.values()
    assert not any(schedule.templates.is_wanted(opens) for opens, _ in schedule.windows)


def test_a_template_holds_no_tensor(forcing):
    model = Calls(None)
    model.register_buffer("shift", torch.ones(256))
    model.function = lambda h: functional.silu(functional.dropout(functional.gelu(h + model.shift)))
    handle = forcing.enable(model)
    for number in range(5):
        plain_step(model, number)
    (schedule,) = handle._on_device.controller.schedules.values()
    assert any(schedule.templates.of(opens) for opens, _ in schedule.windows)
    model.function, watched = None, weakref.ref(model.shift)
    del model.shift
    handle._engine.drain()
    assert watched() is None


def test_recurrent_layers(forcing):
    """The kernel for training and the one for inference differ in bits; gradients being recorded decides."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.lstm, self.b = nn.Linear(32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

        def forward(self, x):
            return self.b(functional.silu(self.lstm(self.a(x))[0]))

    def step(model, number):
        model.zero_grad()
        model(torch.randn(4, 16, 32)).square().mean().backward()
        return gradients(model)

    handle = forcing.compare(Recurrent, step)
    assert "aten.mkldnn_rnn_layer.default" in forcing.operators(handle)


def test_a_step_that_is_over_is_freed_without_a_collection(forcing):
    """Else each holds its plan until the collector runs."""
    model = made()()
    handle = forcing.enable(model)
    controller, observers = handle._on_device.controller, []
    choose = controller.observer

    def observer(*args):
        chosen = choose(*args)
        observers.append(weakref.ref(chosen))
        return chosen

    controller.observer = observer
    for number in range(6):
        plain_step(model, number)
    assert handle._counts.recomputed.tensors
    assert [each() for each in observers[2:-1]] == [None, None, None]


def compare_a_late_write(forcing, write):
    """In the recorded step the same operator writes to a tensor that no recipe needs."""

    def function(h, number):
        made, aside = h.sin() * 1.5, torch.ones_like(h)
        with torch.no_grad():
            write(made if number > 5 else aside)
        return functional.gelu(made).sin()

    forcing.compare(lambda: Numbered(function), plain_step, steps=9)


def test_a_write_through_data(forcing):
    compare_a_late_write(forcing, lambda tensor: tensor.data.mul_(0.5))


def test_a_write_through_a_list(forcing):
    compare_a_late_write(forcing, lambda tensor: torch._foreach_mul_([tensor], 0.5))


def test_a_list_written_after_saving_is_the_usual_error(forcing):
    def function(h, number):
        y = functional.gelu(h)
        if number == 7:
            with torch.no_grad():
                torch._foreach_mul_([h], 0.5)
        return y.sin()

    raised = []

    def step(model, number):
        if number != 6:
            return plain_step(model, number)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            plain_step(model, number)
        raised.append(error)
        model.zero_grad()
        return []

    forcing.compare(lambda: Numbered(function), step, steps=9)
    assert len(raised) == 2, "plain, and with recomputation"


def add_one(tensor):
    with torch.no_grad():
        tensor.add_(1)


def test_a_write_by_another_thread(forcing):
    """No operator of this thread tells of it, but its version does."""

    def function(h, number):
        one = torch.ones(1)
        h = functional.gelu(h + one)
        if number > 5:
            writer = threading.Thread(target=add_one, args=(one,))
            writer.start()
            writer.join()
        return functional.silu(h + one)

    forcing.compare(lambda: Numbered(function), plain_step, steps=9)
