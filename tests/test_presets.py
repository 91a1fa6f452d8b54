"""`offload.enable(model, "smallest" | "balanced" | "fast")`: what each plans, beside the numbers that mean the same."""

from __future__ import annotations

import pytest
import torch
from planned_rig import assert_equal, batch, enabled, known_link, make, plain_run, train  # noqa: F401
from torch import nn

import offload
from offload.options import device_bytes
from offload.plan import least_feasible_limit

ROWS = [256] * 5


def run(*preset: str, **knobs: object):
    """Losses and gradients, the plan, and what the handle says of itself."""
    model, optimizer = make()
    with offload.enable(model, *preset, min_tensor_bytes="4KiB", **knobs) as handle:
        results, _ = train(model, optimizer, ROWS)
        return results, handle.plan, repr(handle)


def test_smallest_is_the_least_memory_there_is():
    results, plan, said = run("smallest")
    assert plan.peak_bytes == least_feasible_limit(plan.trace) < plan.unswapped_peak_bytes
    assert plan.swaps
    assert '"smallest"' in said
    assert_equal(results, plain_run(ROWS)[0])


def test_fast_swaps_nothing_that_fits():
    results, plan, said = run("fast")
    assert not plan.swaps
    assert not plan.recomputes
    assert plan.limit_bytes == int(0.9 * device_bytes(torch.device("cpu")))
    assert "fits within memory_limit" in said
    assert_equal(results, plain_run(ROWS)[0])


def test_balanced_is_the_default():
    model = nn.Linear(2, 2)
    with offload.enable(model, "balanced", host_limit="1GiB") as handle:  # otherwise what is available now
        balanced = handle._options
    with offload.enable(model, host_limit="1GiB") as handle:
        assert handle._options == balanced
    assert balanced.max_slowdown == 0.05


@pytest.mark.parametrize("knob", [{"memory_limit": "1GiB"}, {"max_slowdown": 0.1}, {"n_tensors": -1}])
@pytest.mark.parametrize("preset", ["smallest", "balanced", "fast"])
def test_a_preset_and_a_number_are_two_goals(preset, knob):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"use the preset '{preset}' or {next(iter(knob))}, not both"):
        offload.enable(model, preset, **knob)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("preset", ["tiny", "12GiB", 3])
def test_another_word_is_refused(preset):
    with pytest.raises(ValueError, match=r'the preset is "smallest", .* for a limit write memory_limit="12GiB"'):
        offload.enable(nn.Linear(2, 2), preset)


def test_other_knobs_go_with_a_preset():
    with offload.enable(nn.Linear(2, 2), "smallest", recompute="cheap", min_tensor_bytes="64KiB") as handle:
        assert handle._options.recompute == "cheap"
        assert handle._options.least_memory
