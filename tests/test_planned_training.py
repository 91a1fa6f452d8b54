"""A plan at run time: the limit is kept, the results are the same, and what changes is planned anew."""

import json
import logging
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from live_bytes import Peak, tell_blocks_of_all
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.control.phase import Phase
from offload.control.planned_step import _with_earlier_prefetches, _without_slowing
from offload.plan import InfeasibleLimitError, Link, simulate
from offload.plan.trace import Trace

LINK = Link(2e9, 2e9, 20e-6)
INPUT_BYTES_A_ROW = 32 * 4  # which were there before anybody watched; the targets are not the model's to know


@pytest.fixture(autouse=True)
def known_link(monkeypatch):
    """Plans do not depend on how busy this machine's disk is."""
    monkeypatch.setattr("offload.session.measure_link", lambda device, options: LINK)


@pytest.fixture(autouse=True)
def told_blocks():
    undo = tell_blocks_of_all()
    yield
    undo()


class Residual(nn.Module):
    """A block whose saved tensors are of several sizes, some saved twice, some spans of one storage."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        a, b, c = self.up(self.norm(x)).chunk(3, dim=-1)
        return x + self.down(torch.tanh(a) * torch.sigmoid(b) + nn.functional.gelu(c))


def make(blocks=6, width=32):
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual(width) for _ in range(blocks)], nn.Linear(width, 4))
    return model, torch.optim.Adam(model.parameters())


def batch(rows, seed, width=32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randint(4, (rows,), generator=generator)


def train(model, optimizer, rows, first_watched=None):
    """Train a step for each number of rows: losses and gradients of all steps, and the peak of the watched ones."""
    peak = Peak()
    results = []
    for number, n in enumerate(rows):
        x, y = batch(n, number)
        watches = first_watched is not None and number >= first_watched
        if watches:
            with peak.watch():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        del loss, x, y
        optimizer.step()
        optimizer.zero_grad()
    return results, peak.nbytes + INPUT_BYTES_A_ROW * max(rows)


def held_bytes(model, optimizer):
    state = [value for row in optimizer.state.values() for value in row.values()]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *state])


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def enabled(model, **knobs):
    return offload.enable(model, **({"min_tensor_bytes": "4KiB"} | knobs))


def plain_run(rows, first_watched=2, **sizes):
    model, optimizer = make(**sizes)
    results, peak = train(model, optimizer, rows, first_watched)
    return results, peak + held_bytes(model, optimizer)


@pytest.mark.parametrize(
    "fraction", [pytest.param(0.6, marks=pytest.mark.long), 0.4, pytest.param(0.3, marks=pytest.mark.long)]
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
        with pytest.raises(RuntimeError, match="manual mode"):
            handle.trace()


def test_predicted_and_measured_stand_side_by_side(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 4)
        about = handle.report().to_dict()
        verdict = about["verdict"]
        assert verdict["step_seconds_planned"] == handle.plan.expected_seconds
        assert verdict["step_seconds"] > 0
        assert verdict["step_bytes_planned"] == handle.plan.peak_bytes
        planned = [row for row in about["steps_measured"] if not row["profiled"]]
        assert planned
        assert all(0 <= row["paused_seconds"] <= row["seconds"] for row in planned)
        planned = handle._on_device.latest()
        assert len(planned.starts) == len(handle.plan.timing.start)
        assert list(planned.starts) == sorted(planned.starts)
        assert "predicted" in str(handle.report())
        assert "released at node" in handle.plan.explain()


def test_a_slower_link_is_planned_anew_and_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("offload.control.promise.measured_link", lambda engine, link: Link(1e6, 1e6))
    _, plain_peak = plain_run([512] * 4, blocks=3)
    model, optimizer = make(blocks=3)
    options = {"memory_limit": int(0.6 * plain_peak), "spill_dir": tmp_path, "recompute": False}
    with caplog.at_level(logging.INFO, "offload"), enabled(model, **options) as handle:
        train(model, optimizer, [512] * 12)
        assert "copy-out is slower than planned" in caplog.text
        assert (handle.plan.link.out_bandwidth, handle.plan.link.in_bandwidth) == (1e6, 1e6)
        assert 1 <= handle._on_device.latest().replans <= LIMITS.replans
        assert caplog.text.count("planning again") <= LIMITS.replans


def test_steady_steps_are_measured_now_and_then(tmp_path):
    model, optimizer = make(blocks=3)
    with enabled(model, memory_limit="1GiB", spill_dir=tmp_path) as handle:
        handle._controller._limits = replace(LIMITS, steady_measured_every=4, tolerance=math.inf, faster_link=math.inf)
        train(model, optimizer, [512] * 6)
        (state,) = handle._controller._states.values()
        assert state.phase is Phase.STEADY
        before = handle.report()
        train(model, optimizer, [512] * 16)
        after = handle.report()
        assert len(after.steps_measured) - len(before.steps_measured) == 16 // 4
        assert after.unmeasured_steps - before.unmeasured_steps == 16 - 16 // 4


def test_durations_are_of_computation_without_what_copies_slow_it_by(tmp_path, monkeypatch):
    """Copies that are said to take much of the processor make the same step's own computation shorter."""
    assert _without_slowing((1.0, 3.0), 1.0) == (0.75, 2.25)
    assert _without_slowing((1.0, 3.0), 100.0) == (0.5, 1.5)
    assert _without_slowing((0.0,), 1.0) == (0.0,)
    model, optimizer = make()
    monkeypatch.setattr("offload.session.measure_link", lambda device, options: replace(LINK, byte_seconds=1e-9))
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 6)
        plan = handle.plan
        assert plan.swaps
        moved = sum(tensor.bytes for tensor in plan.trace.tensors if tensor.id in {swap.id for swap in plan.swaps})
        hooks = len(plan.swaps) * plan.link.swap_seconds
        assert plan.overhead_seconds == pytest.approx(moved * 1e-9 + hooks)
        assert hooks > 0
        (planned,) = [state.planned for state in handle._controller._states.values()]
        steps = [record for record in handle.report().steps_measured if not record.profiled][
            -len(planned.node_seconds) :
        ]
        whole = [sum(row) for row in planned.node_seconds]
        assert all(mine < record.seconds for mine, record in zip(whole, steps, strict=True))


def test_a_faster_link_gives_memory_back(tmp_path, monkeypatch):
    """What the slow link forbade within the slowdown, the faster one allows."""
    monkeypatch.setattr("offload.session.measure_link", lambda device, options: Link(1e3, 1e3))
    monkeypatch.setattr("offload.control.promise.measured_link", lambda engine, link: Link(1e12, 1e12))
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 2)
        before = handle.plan
        assert not before.swaps, "nothing is worth it"
        train(model, optimizer, [512] * 3)
        assert (handle.plan.link.out_bandwidth, handle.plan.link.in_bandwidth) == (1e12, 1e12)
        assert handle.plan.peak_bytes < before.peak_bytes


def test_a_late_tensor_comes_back_earlier_where_there_is_room(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 2)
        plan = handle.plan
        swap = next(s for s in plan.swaps if s.prefetch > s.release)
        late = {swap.id: plan.step_seconds}
        longer = _with_earlier_prefetches(plan, late, plan.unswapped_peak_bytes)
        moved = next(s for s in longer.swaps if s.id == swap.id)
        assert moved.prefetch < swap.prefetch
        assert simulate(plan.trace, longer.swaps, plan.link).peak_bytes == longer.peak_bytes
        tight = _with_earlier_prefetches(plan, late, plan.peak_bytes)
        assert tight.peak_bytes <= plan.peak_bytes


def test_what_somebody_else_holds_is_no_candidate(tmp_path):
    """The batch that the training loop still holds: moving it would free nothing."""
    model, optimizer = make(blocks=1)
    with enabled(model, spill_dir=tmp_path) as handle:
        x, y = batch(4096, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        assert x.nbytes in {entry.nbytes for entry in handle._controller.latest().profile.order.entries.values()}
        produced_by_input = [t for t in handle.trace().tensors if t.packed == 0]
        assert not produced_by_input
        del x, y
        optimizer.step()


SCRIPT = """
import sys, torch, offload
from torch import nn
assert sys.argv[1:] == ["--epochs", "3"], sys.argv
print("hello from the script")
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
offload.enable(model, min_tensor_bytes="4KiB", n_tensors=1)
optimizer = torch.optim.Adam(model.parameters())
for step in range({steps}):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    print("step", step)
print("the end")
"""


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.long)])
def test_plan_of_a_script(tmp_path, steps):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    command = [sys.executable, "-m", "offload", "plan", "--json", str(script), "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert "hello from the script" in done.stderr
    assert ("the end" in done.stderr) == (steps == 1)
    names = [row["name"] for row in about["options"]]
    assert names == ["unswapped", "5% slowdown", "10% slowdown", "25% slowdown", "least memory"]
    for row in about["options"]:
        assert row["host_bytes"] == 0, "on the CPU everything goes to disk"
        assert row["peak_bytes"] <= about["options"][0]["peak_bytes"]
    assert about["options"][0]["disk_bytes"] == 0
    assert about["options"][-1]["disk_bytes"] > 0


WITH_RECIPES = """
import torch
from torch import nn

import offload

layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
model = nn.Sequential(*layers)
offload.enable(model, min_tensor_bytes="4KiB"{options})
for step in range({steps}):
    model(torch.randn(512, 64)).square().mean().backward()
    print("step", step)
"""
SLOW = ["--out-bandwidth", "1MB/s", "--in-bandwidth", "1MB/s"]


def plan_of(script, text, *words):
    script.write_text(text)
    command = [sys.executable, "-m", "offload", "plan", "--json", *SLOW, *words, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("wish", [(), ("--max-slowdown", "0.05")])
def test_plan_of_a_script_tries_recipes_where_the_swap_plan_waits(tmp_path, wish):
    script = tmp_path / "train.py"
    about, printed = plan_of(script, WITH_RECIPES.format(steps=5, options=""), *wish)
    assert about["recomputes"]
    assert "step 1" in printed  # the trial step
    assert "step 2" not in printed
    alone, printed = plan_of(script, WITH_RECIPES.format(steps=5, options=""), "--no-recompute", *wish)
    assert alone["recomputes"] == []
    assert "step 1" not in printed
    assert about["peak_bytes"] < alone["peak_bytes"]


def test_plan_of_a_script_of_two_steps_reads_the_trial_at_the_end(tmp_path):
    assert plan_of(tmp_path / "train.py", WITH_RECIPES.format(steps=2, options=""))[0]["recomputes"]


@pytest.mark.parametrize(
    ("steps", "options"),
    [(1, ""), (3, ", recompute=False"), (3, ", n_tensors=1")],
)
def test_plan_of_a_script_without_a_trial_step_swaps_alone(tmp_path, steps, options):
    about, printed = plan_of(tmp_path / "train.py", WITH_RECIPES.format(steps=steps, options=options))
    assert about["recomputes"] == []
    assert "step 1" not in printed


def test_plan_of_a_script_that_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    command = [sys.executable, "-m", "offload", "plan", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "finished no training step under offload.enable" in done.stderr
    script.write_text("raise SystemExit(7)")
    assert subprocess.run(command, capture_output=True, timeout=240).returncode == 7
