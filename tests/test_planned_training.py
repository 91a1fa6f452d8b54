"""A plan at run time: the limit is kept, the results are the same, and what changes is planned anew."""

import math
import os
from contextlib import nullcontext

import pytest
import torch
from live_bytes import Peak
from planned_rig import (  # noqa: F401
    Residual,
    assert_equal,
    batch,
    enabled,
    held_bytes,
    known_link,
    make,
    plain_run,
    told_blocks,
    train,
)
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.plan import InfeasibleLimitError
from offload.plan.trace import Trace


@pytest.mark.parametrize(
    "fraction", [pytest.param(0.6, marks=pytest.mark.full), 0.4, pytest.param(0.3, marks=pytest.mark.full)]
)
def test_memory_limit_is_kept(fraction, tmp_path):
    rows = [512] * 6
    expected, plain_peak = plain_run(rows)
    limit = int(fraction * plain_peak)
    model, optimizer = make()
    with enabled(model, memory_limit=limit, spill_dir=tmp_path) as handle:
        results, peak = train(model, optimizer, rows, first_watched=2)
        peak += held_bytes(model, optimizer)
        assert_equal(results, expected)
        assert handle.plan.peak_bytes <= limit
        assert peak <= limit
        assert handle.plan.unswapped_peak_bytes == pytest.approx(plain_peak, rel=0.05)
        assert peak == pytest.approx(handle.plan.peak_bytes, rel=0.05)
        assert handle.report().swapped.tensors > 0


def test_the_profiling_step_needs_the_least_memory(tmp_path):
    rows = [512] * 2
    _, plain_peak = plain_run([512] * 3)
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, rows)
        handle.plan  # noqa: B018
        assert handle._engine.resident.peak < handle._engine.unswapped.peak / 4
        assert handle.plan.peak_bytes < plain_peak / 2


def test_an_impossible_limit_is_refused_before_the_first_planned_step(tmp_path):
    model, optimizer = make()
    with enabled(model, memory_limit="100KiB", spill_dir=tmp_path) as handle:
        train(model, optimizer, [512])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(InfeasibleLimitError, match="the least that works for this step is") as refused:
            train(model, optimizer, [512])
        assert refused.value.least_limit_bytes > 100 << 10
        assert 1 <= len(refused.value.reasons) <= 3
        assert_equal(list(model.parameters()), before)
        least = refused.value.least_limit_bytes
        assert handle.plan is None
    model, optimizer = make()
    with enabled(model, memory_limit=least, spill_dir=tmp_path):
        train(model, optimizer, [512] * 2)


def test_default_and_knobs_of_a_plan(tmp_path):
    for knobs, slowdown, limit in (
        ({}, 0.05, None),
        ({"max_slowdown": 0}, 0.0, None),
        ({"memory_limit": "64MiB", "max_slowdown": 0.25}, 0.25, 64 << 20),
    ):
        model, optimizer = make()
        with enabled(model, spill_dir=tmp_path, **knobs) as handle:
            assert (handle._options.max_slowdown, handle._options.memory_limit) == (slowdown, limit)
            train(model, optimizer, [64] * 2)
            plan = handle.plan
            assert plan.step_seconds <= plan.compute_seconds * (1 + slowdown) * (1 + 1e-9)


def test_a_fraction_is_of_the_device(tmp_path):
    model, _ = make()
    with enabled(model, memory_limit=0.5, spill_dir=tmp_path) as handle:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < handle._options.memory_limit <= physical // 2 + 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"memory_limit": 0}, "memory_limit"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"memory_limit": "12GB!"}, "memory_limit"),
        ({"memory_limit": 1.5}, "fraction of the device"),
        ({"memory_limit": 0.0}, "fraction of the device"),
        ({"memory_limit": True}, "memory_limit takes"),
        ({"max_slowdown": -0.1}, "max_slowdown is a fraction"),
        ({"max_slowdown": math.nan}, "max_slowdown is a fraction"),
        ({"max_slowdown": "5%"}, "max_slowdown is a fraction"),
        ({"memory_limit": "1GiB", "n_tensors": 3}, "not both"),
        ({"max_slowdown": 0.1, "n_tensors": -1}, "not both"),
        ({"max_slowdown": 0.1, "lb": 2}, "lb needs n_tensors"),
    ],
)
def test_wrong_knobs(knobs, message):
    model, _ = make()
    with pytest.raises(ValueError, match=message):
        offload.enable(model, **knobs)
    offload.enable(model).disable()


def test_several_lengths_and_a_ragged_batch_stall_in_their_first_steps_only(tmp_path):
    rows = [256, 384, 512, 256, 384, 512, 100] * 2
    model, optimizer = make(blocks=3)
    expected, _ = train(model, optimizer, rows)
    model, optimizer = make(blocks=3)
    with enabled(model, max_slowdown=0.1, spill_dir=tmp_path, recompute=False) as handle:
        results, _ = train(model, optimizer, rows)
        report = handle.report()
        assert_equal(results, expected)
        assert report.profiled_steps == 4
        assert sum(record.profiled for record in report.steps_measured) == 4
        train(model, optimizer, rows)
        assert handle.report().loaded_late == report.loaded_late, (
            "a known signature waits for nothing that it did not ask back in time"
        )
        assert handle.report().profiled_steps == 4


def test_a_new_length_every_time_is_not_profiled_every_time(tmp_path):
    """Smaller shapes borrow the plan of a larger one, whose limit then holds for them too."""
    rows = [512, 512, 500, 490, 480, *range(470, 270, -20), 600, 600, 590]
    model, optimizer = make()
    expected, _ = train(model, optimizer, rows)
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        results, _ = train(model, optimizer, rows)
        assert_equal(results, expected)
        report = handle.report()
        assert report.profiled_steps == 5, "512, 500, 490, 480, and 600, which is larger than any"
        assert report.borrowed_steps == len(rows) - 7
        assert handle._engine.resident.peak < handle._engine.unswapped.peak / 2


def test_a_borrowed_plan_that_does_not_fit_is_left(tmp_path):
    """The same shapes as ever, another branch: right by demand, and then profiled on its own."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.Sequential(*[Residual(32) for _ in range(3)]), nn.Linear(32, 4)

        def forward(self, x):
            x = self.blocks(x)
            if len(x) == 300:
                x = torch.cat([torch.tanh(x), torch.tanh(x * x)])[: len(x)]
            return self.head(x)

    def run(**knobs):
        torch.manual_seed(0)
        model = Branching()
        handle = enabled(model, spill_dir=tmp_path, **knobs) if knobs else None
        results, _ = train(model, torch.optim.Adam(model.parameters()), [512, 511, 510, 509, 512, 300, 300, 300])
        return results, handle

    expected, _ = run()
    results, handle = run(max_slowdown=10.0)
    assert_equal(results, expected)
    assert handle.report().profiled_steps == 5
    handle.disable()


def test_evaluation_and_accumulation_in_between(tmp_path):
    def run(model, optimizer):
        losses = []
        for number in range(4):
            for micro in range(2):
                x, y = batch(256, 2 * number + micro)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.detach().clone())
                del loss
            model.eval()
            with torch.no_grad():
                losses.append(model(batch(64, number)[0]).sum())
            model.train()
            optimizer.step()
            losses += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
        return losses

    expected = run(*make(blocks=3))
    model, optimizer = make(blocks=3)
    with enabled(model, max_slowdown=0.1, spill_dir=tmp_path) as handle:
        assert_equal(run(model, optimizer), expected)
        assert handle.report().profiled_steps == 1


@pytest.mark.long
def test_memory_limit_is_kept_while_gradients_accumulate(tmp_path):
    def run(model, optimizer):
        peaks, results = [], []
        for number in range(6):
            x, y = batch(512, number, 64)
            there = (
                held_bytes(model, optimizer)
                + x.nbytes
                + sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            )
            peak = Peak()
            with peak.watch() if number >= 2 else nullcontext():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            peaks.append(there + peak.nbytes)
            results += [parameter.grad.clone() for parameter in model.parameters()]
            del loss, x, y
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return results, max(peaks[2:])

    expected, plain_peak = run(*make(width=64))
    model, optimizer = make(width=64)
    limit = int(plain_peak * 0.5)
    with enabled(model, memory_limit=limit, spill_dir=tmp_path) as handle:
        results, peak = run(model, optimizer)
        assert_equal(results, expected)
        assert peak <= limit
        assert handle.plan.swaps or handle.plan.recomputes


def test_trace_is_that_of_the_step(tmp_path):
    model, optimizer = make(blocks=2)
    with enabled(model, spill_dir=tmp_path) as handle:
        with pytest.raises(RuntimeError, match="no step has been profiled yet"):
            handle.trace()
        with handle.step():
            x, y = batch(512, 0)
            loss = nn.functional.cross_entropy(model(x), y)
        del x
        loss.backward()
        trace = handle.trace()
        assert handle.plan is None
        names = {node.name for node in trace.nodes}
        assert {"0.up", "1.up", "0.down", "1.norm"} <= names
        assert any(node.backward for node in trace.nodes)
        flags = [node.backward for node in trace.nodes]
        assert flags == sorted(flags), "backward follows forward"
        row_bytes = 512 * 32 * 4
        # Of the spans of one storage one tensor is made: it comes and goes as a whole.
        assert {tensor.bytes for tensor in trace.tensors} <= {512 * 4 * 4, row_bytes, 2 * row_bytes, 3 * row_bytes}
        assert 3 * row_bytes in {tensor.bytes for tensor in trace.tensors}
        assert min(trace.base_bytes) >= held_bytes(model, optimizer)
        trace.save(tmp_path / "step.json")
        assert Trace.load(tmp_path / "step.json") == trace


def test_two_forwards_before_their_backwards(tmp_path):
    def run(model, optimizer):
        results = []
        for number in range(4):
            (x, y), (u, v) = batch(256, number), batch(256, number + 10)
            first = nn.functional.cross_entropy(model(x), y)
            second = nn.functional.cross_entropy(model(u), v)
            (second + first).backward()
            results += [first.detach(), second.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return results

    expected = run(*make())
    model, optimizer = make()
    with enabled(model, max_slowdown=1.0, spill_dir=tmp_path) as handle:
        assert_equal(run(model, optimizer), expected)
        handle.report()
        assert handle.report().profiled_steps == 1
        assert handle.plan is not None


def test_a_profiled_forward_that_nobody_differentiates(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=1.0, spill_dir=tmp_path) as handle:
        for number in range(8):
            model(batch(256, number)[0])
        train(model, optimizer, [256] * 6)
        assert handle.plan is not None
        assert handle._on_device.latest().profile.knows_temporaries
        assert not torch.autograd._profiler_enabled()


def test_temporaries_that_could_not_be_watched_are_said(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=1.0, spill_dir=tmp_path) as handle:
        with Peak().watch():
            train(model, optimizer, [256] * 2)
        assert any("temporaries are unknown" in note for note in handle.report().notes)


def test_a_step_that_is_never_the_same_is_not_profiled_for_ever(tmp_path):
    """Layers that drop out at random: right to the last bit, and after some tries by demand."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Residual(32) for _ in range(4))
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            for block in self.blocks:
                if torch.rand(()) < 0.5:
                    x = block(x)
            return self.head(x)

    def run(**knobs):
        torch.manual_seed(0)
        model = Dropping()
        handle = enabled(model, spill_dir=tmp_path, **knobs) if knobs else None
        losses = []
        for number in range(30):
            x, y = batch(256, number)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return losses, handle

    expected, _ = run()
    results, handle = run(max_slowdown=1.0)
    assert_equal(results, expected)
    assert 2 <= handle.report().profiled_steps <= LIMITS.deviations
    handle.disable()


def test_by_hand_there_is_no_plan():
    model, _ = make()
    with offload.enable(model, n_tensors=3) as handle:
        assert handle.plan is None
        with pytest.raises(RuntimeError, match="n_tensors profiles nothing"):
            handle.trace()
