"""A plan that swaps nothing takes its hooks off; what is new is noticed all the same."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from planned_rig import assert_equal, batch, enabled, train
from planned_rig import make as make_blocks
from torch import nn

from offload.control import controller, promise
from offload.control.limits import LIMITS
from offload.plan import Link
from offload.runtime.executor import Stopwatch


def make():
    return make_blocks(blocks=3)


@pytest.fixture(autouse=True)
def costly_swaps(monkeypatch):
    """A link over which no swap is worth its time; what this machine really takes leads to no other plan."""
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: Link(1e3, 1e3, 10.0))
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, replans=0))


def run_enabled(model, optimizer, count, tmp_path, **knobs):
    """Train `count` steps: losses and gradients, the report and the plan."""
    with enabled(model, spill_dir=tmp_path, recompute=False, **knobs) as handle:
        results, _ = train(model, optimizer, [256] * count)
        return results, handle.report(), handle.plan


def test_a_plan_without_swaps_takes_the_hooks_off(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, replans=0, recheck_steps=5))
    expected, _ = train(*make(), [256] * 12)
    results, report, plan = run_enabled(*make(), 12, tmp_path, max_slowdown=0.05)
    assert_equal(results, expected)
    assert plan.swaps == ()
    # One profiled, three measured; then the fifth and the tenth of the planned eleven.
    assert (report.steps, report.profiled_steps, report.bare_steps) == (12, 1, 12 - 1 - 3 - 2)
    assert report.settled_steps == 12 - 1 - 3
    assert "hooks are off while the plan swaps nothing (6 of 12 steps ran without them)" in str(report)
    assert report.verdict.step_seconds is not None


def test_under_a_limit_the_hooks_stay_on(tmp_path):
    expected, _ = train(*make(), [256] * 8)
    results, report, plan = run_enabled(*make(), 8, tmp_path, memory_limit="8GiB")
    assert_equal(results, expected)
    assert (plan.swaps, report.bare_steps) == ((), 0)


@pytest.mark.parametrize("covered", [False, True])
def test_with_hooks_off_a_new_shape_is_noticed(covered, tmp_path):
    model, optimizer = make()
    rows = [256] * 6 + [128] * 6 + [256] * 2
    expected, _ = train(*make(), rows)
    results = []
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        for number, n in enumerate(rows):
            x, y = batch(n, number)
            with handle.step() if covered else nullcontext():
                loss = nn.functional.cross_entropy(model(x), y)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            loss.backward()
            results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        report = handle.report()
        assert_equal(results, expected)
        assert (report.steps, report.profiled_steps, report.bare_steps) == (14, 2, 2 + 2 + 2)


def test_several_forwards_in_a_step_without_hooks_are_one_step(tmp_path):
    model, _ = make()
    x, _ = batch(256, 0)
    inside = []
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        for number in range(6):
            with pytest.raises(ArithmeticError) if number == 5 else nullcontext(), handle.step():
                loss = model(x).square().sum()
                inside.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
                with handle.step():
                    loss = loss + model(x).sum()
                if number == 5:
                    raise ArithmeticError
            loss.backward()
        assert [hooks is None for hooks in inside] == [False] * 4 + [True] * 2
        assert (handle.report().steps, handle.report().bare_steps) == (6, 2)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(batch(64, 1)[0]).sum().backward()  # another shape, and not inside of that step any more
        assert handle.report().profiled_steps == 2


def test_a_forward_under_hooks_of_others_leaves_the_steps_own_alone(tmp_path):
    """It has a round of its own inside the step's; each takes off the hooks that it has put on."""
    model, optimizer = make()
    x, _ = batch(256, 0)
    inside = []
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [256] * 6)
        bare = handle.report().bare_steps
        for _ in range(2):
            with handle.step():
                with torch.autograd.graph.save_on_cpu():
                    loss = model(x).square().sum()
                loss = loss + model(x).sum()
                inside.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            loss.backward()
        assert inside == [None, None]
        assert handle.report().bare_steps == bare + 4


def test_without_hooks_a_recorded_step_is_watched_all_the_same(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [256] * 6)
        bare = handle.report().bare_steps
        with handle.timeline(tmp_path / "step.json"):
            train(model, optimizer, [256])
        assert handle.report().bare_steps == bare > 0
    events = json.loads((tmp_path / "step.json").read_text())
    assert any("Backward" in str(event.get("name")) for event in events["traceEvents"])


@pytest.mark.parametrize("is_guarded", [True, False])
def test_nothing_is_prepared_to_measure_a_step_without_hooks(is_guarded, tmp_path, monkeypatch):
    """Without the guard, each of them gets a stopwatch that nothing ever stops."""
    made = []
    monkeypatch.setattr(promise, "Stopwatch", lambda engine: made.append(True) or Stopwatch(engine))
    if not is_guarded:
        monkeypatch.setattr(controller.PlanController, "_measures", lambda *_: True)
    model, optimizer = make()
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [256] * 6)
        measured, bare = len(made), handle.report().bare_steps
        train(model, optimizer, [256] * 4)
        assert handle.report().bare_steps == bare + 4
    assert len(made) - measured == (0 if is_guarded else 4)
