"""The slowdown of a plan is estimated from the measurements of all plans of a search, and from what is expected."""

from dataclasses import replace
from types import SimpleNamespace

import plant as machines
import pytest
from test_frontier import machine, slowdown

from offload.control.estimate import estimated
from offload.control.limits import LIMITS
from offload.control.tried_plan import TriedPlan

ALL_BYTES = 1000
ALLOWED = 0.05
EACH_ALONE = replace(LIMITS, plan_spread=1000.0)  # a mutant: what was measured of a plan counts for this plan only


def tried(moved_bytes, measured, error, *, explained=0.0, compute_seconds=1.0):
    """A plan that moves this many of 1,000 bytes, and the slowdown that was measured."""
    tensors = [
        SimpleNamespace(id=0, bytes=moved_bytes, copied_bytes=moved_bytes),
        SimpleNamespace(id=1, bytes=ALL_BYTES - moved_bytes, copied_bytes=ALL_BYTES - moved_bytes),
    ]
    plan = SimpleNamespace(trace=SimpleNamespace(tensors=tensors), swaps=[SimpleNamespace(id=0)], recomputes=())
    unexplained = compute_seconds * (measured - explained)
    return TriedPlan(plan, measured, 3, compute_seconds, unexplained, error)


def test_a_measurement_without_error_is_the_estimate():
    plans, cost = estimated([tried(500, 0.08, 0.0), tried(100, 0.01, 0.0)], 1e-4, LIMITS)
    assert [each.slowdown for each in plans] == pytest.approx([0.08, 0.01])
    assert [each.error for each in plans] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert cost == pytest.approx(0.08 / 500, rel=0.02)


@pytest.mark.parametrize("compute_seconds", [1.0, 20.0])
@pytest.mark.parametrize("explained", [0.0, 0.02])
def test_an_estimate_is_the_mean_of_expected_and_measured_by_their_errors(explained, compute_seconds):
    """500 bytes are expected to cost 5 % of the step, give or take as much again and half of 3 %."""
    plan = tried(500, explained + 0.01, 0.05, explained=explained, compute_seconds=compute_seconds)
    [found], cost = estimated([plan], 1e-4 * compute_seconds, LIMITS)
    expected_error = 0.05 * LIMITS.cost_spread + 0.5 * LIMITS.cost_spread_min
    variance = expected_error**2 + LIMITS.plan_spread**2
    weight = variance / (variance + 0.05**2)
    assert found.slowdown == pytest.approx(explained + 0.05 + weight * (0.01 - 0.05))
    assert found.error == pytest.approx(LIMITS.standard_errors * ((1 - weight) * variance) ** 0.5)
    assert cost == pytest.approx(compute_seconds * 1e-4 * (1 + expected_error**2 / (variance + 0.05**2) * (0.2 - 1)))


def test_a_precise_measurement_corrects_that_of_another_plan():
    disturbed, precise = tried(400, 0.15, 0.06), tried(800, 0.04, 0.002)
    plans, _ = estimated([disturbed, precise], 5e-5, LIMITS)
    assert plans[0].slowdown == pytest.approx(0.02, abs=0.005)
    assert plans[0].error < 0.01
    assert plans[1].slowdown == pytest.approx(0.04, abs=0.001)


def test_alone_it_is_not_corrected():
    """A mutant."""
    plans, _ = estimated([tried(400, 0.15, 0.06), tried(800, 0.04, 0.002)], 5e-5, EACH_ALONE)
    assert plans[0].slowdown == pytest.approx(0.15)


def test_a_byte_costs_at_least_nothing():
    _, cost = estimated([tried(500, -0.03, 0.0)], 1e-5, LIMITS)
    assert cost == 0.0


def searches(limits):
    """Searches on 12 machines with 6 % of noise: how many swap nothing, how much they save, how many are too slow."""
    nothing, saved, slow = 0, [], 0
    for seed in range(36):
        plant, profiled, calibrated = machine(seed % 12, noise=0.06)
        plant.reseed(1000 + seed)
        planned, _ = machines.run(plant, profiled, calibrated, 60, limits=limits, max_slowdown=ALLOWED)
        nothing += not planned.plan.swaps
        saved.append(1 - planned.plan.peak_bytes / planned.plan.unswapped_peak_bytes)
        slow += slowdown(plant, planned) > ALLOWED + 0.01
    return nothing, sum(saved) / len(saved), slow


def test_noise_costs_less_memory_than_if_each_plan_is_estimated_alone():
    nothing, saved, slow = searches(LIMITS)
    alone_nothing, alone_saved, alone_slow = searches(EACH_ALONE)
    assert nothing <= alone_nothing
    assert saved > alone_saved
    assert slow <= alone_slow
