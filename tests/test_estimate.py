"""The slowdown of a plan is estimated from the measurements of all plans of a search, and from what is expected."""

from dataclasses import replace
from types import SimpleNamespace

import plant as machines
import pytest
from test_plan_search import machine, slowdown

from offload.control.estimate import estimated
from offload.control.limits import LIMITS
from offload.control.measured_slowdown import standard_error
from offload.control.tried_plan import TriedPlan

ALL_BYTES = 1000
ALLOWED = 0.05
SEARCHES = 72
EACH_ALONE = replace(LIMITS, plan_spread=1000.0)  # a mutant: what was measured of a plan counts for this plan only
NO_FIXED_COST = replace(LIMITS, fixed_spread=0.0)  # a mutant: the whole slowdown is proportional to the bytes
EXACT_PREDICTIONS = replace(LIMITS, predicted_spread=0.0)  # a mutant
PAIRS = 5


def tried(copied_bytes, measured, error, *, predicted=0.0, recomputed_bytes=0, compute_seconds=1.0):
    """A plan that copies and recomputes some of 1,000 bytes, and the slowdown that was measured."""
    sizes = enumerate((copied_bytes, recomputed_bytes, ALL_BYTES - copied_bytes - recomputed_bytes))
    tensors = [SimpleNamespace(id=number, bytes=size, copied_bytes=size) for number, size in sizes]
    moves = {"swaps": [SimpleNamespace(id=0)], "recomputes": [SimpleNamespace(id=1)]}
    plan = SimpleNamespace(trace=SimpleNamespace(tensors=tensors), **moves)
    rest_seconds = compute_seconds * (measured - predicted)
    return TriedPlan(plan, measured, error, 0.0, PAIRS, compute_seconds, rest_seconds)


def slowdowns(plans, byte_seconds=0.0, limits=LIMITS):
    return [each.slowdown for each in estimated(plans, byte_seconds, limits).tried]


def test_a_measurement_without_error_is_the_estimate():
    found = estimated([tried(500, 0.08, 0.0), tried(100, 0.01, 0.0)], 1e-4, LIMITS)
    assert [each.slowdown for each in found.tried] == [0.08, 0.01]
    assert [(each.error, each.measured_error) for each in found.tried] == [(0.0, 0.0)] * 2
    assert found.byte_seconds == pytest.approx(0.08 / 500, rel=0.1)


@pytest.mark.parametrize("compute_seconds", [1.0, 20.0])
@pytest.mark.parametrize(("predicted", "rest"), [(0.0, 0.01), (0.02, 0.01), (0.02, 0.09)])
def test_an_estimate_is_the_mean_of_expected_and_measured_by_their_errors(predicted, rest, compute_seconds):
    """Half of the bytes are expected to cost 5 % of the step. There is a fixed cost only if it cost more."""
    plan = tried(500, predicted + rest, 0.05, predicted=predicted, compute_seconds=compute_seconds)
    found = estimated([plan], 1e-4 * compute_seconds, LIMITS)
    of_copies = 0.5 * (LIMITS.cost_spread * 0.1 + LIMITS.cost_spread_more)
    own = LIMITS.plan_spread**2 + (LIMITS.predicted_spread * predicted) ** 2
    variance = of_copies**2 + own + (LIMITS.fixed_spread**2 if rest > 0.05 else 0.0)
    weight = variance / (variance + 0.05**2)
    [estimate] = found.tried
    assert estimate.slowdown == pytest.approx(predicted + 0.05 + weight * (rest - 0.05))
    assert estimate.error == pytest.approx(LIMITS.standard_errors * ((1 - weight) * variance) ** 0.5)
    assert estimate.measured_error == pytest.approx(0.05)
    more = of_copies**2 / (variance + 0.05**2) * (rest - 0.05)
    assert found.byte_seconds == pytest.approx(compute_seconds * (0.05 + more) / 500)


def test_a_precise_measurement_corrects_that_of_another_plan():
    plans = tried(700, 0.15, 0.06), tried(800, 0.04, 0.002)
    disturbed, precise = estimated(plans, 5e-5, LIMITS).tried
    assert disturbed.slowdown == pytest.approx(0.045, abs=0.01)
    assert disturbed.error < 0.02
    assert precise.slowdown == pytest.approx(0.045, abs=0.01)
    assert slowdowns(plans, 5e-5, EACH_ALONE)[0] == pytest.approx(0.15)  # a mutant


def test_a_cost_that_all_plans_have_is_not_one_of_bytes():
    """A plan that copies little is as slow as one that copies much: hooks cost more than predicted."""
    plans = tried(900, 0.06, 0.003), tried(100, 0.055, 0.01)
    assert slowdowns(plans)[1] > 0.04
    assert slowdowns(plans, limits=NO_FIXED_COST)[1] < 0.03  # a mutant


def test_a_large_prediction_is_less_certain_than_a_small_one():
    """Copies are predicted to take long, because the link was measured beside another program."""
    plan = tried(100, 0.03, 0.02, predicted=0.15)
    assert slowdowns([plan])[0] < 0.05
    assert slowdowns([plan], limits=EXACT_PREDICTIONS)[0] > 0.06  # a mutant


def test_recomputed_bytes_have_a_cost_of_their_own():
    plans = tried(800, 0.1, 0.005), tried(0, 0.0, 0.005, recomputed_bytes=600)
    found = estimated(plans, 1e-4, LIMITS)
    assert found.byte_seconds == pytest.approx(0.1 / 800, rel=0.1)
    assert found.recompute_byte_seconds < 0.01 / 600


def test_a_fixed_cost_is_not_negative():
    """Copies were calibrated to cost 20 times as much, beside another program: the first plan copies little."""
    plan = tried(20, 0.0, 0.002)
    assert estimated([plan], 2e-3, LIMITS).byte_seconds < 2e-4


def test_a_byte_costs_at_least_nothing():
    found = estimated([tried(500, -0.03, 0.0, recomputed_bytes=100)], 1e-5, LIMITS)
    assert (found.byte_seconds, found.recompute_byte_seconds) == (0.0, 0.0)


def test_a_plan_that_was_clearly_measured_to_be_too_slow_is_not_kept():
    """Nothing that was expected explains it."""
    plan = tried(20, 0.09, 0.02)
    [found] = estimated([plan], 0.0, LIMITS).tried
    assert found.slowdown + found.error < 0.07
    assert found.slowdown_max == pytest.approx(0.09 - 0.02)


def test_a_plan_that_measures_faster_than_without_swapping_is_not_kept_for_that():
    """Its steps vary by so much that nothing is known. If its estimate could be negative, it would be kept."""
    [found] = estimated([tried(50, -0.05, 0.08)], 0.0, replace(LIMITS, plan_spread=1.0)).tried
    assert found.measured + found.error < ALLOWED
    assert (found.slowdown, found.slowdown_max > ALLOWED) == (0.0, True)


@pytest.mark.parametrize(
    ("own", "others", "counted"), [(0.02, [], 0.02), (0.0, [], 0.001), (0.0, [0.08], 0.02), (0.03, [0.08], 0.03)]
)
def test_a_small_deviation_of_few_steps_counts_as_at_least_half_of_what_is_usual(own, others, counted):
    limits = replace(LIMITS, deviation_min=0.001)
    assert standard_error(own, 4, others, limits) == pytest.approx(counted / 2)


def test_on_a_noisy_machine_a_plan_is_not_kept_because_little_was_expected_of_it():
    """Copies were calibrated to cost nothing, and steps vary by 20 %. What measures 15 % slower is not kept."""
    [found] = estimated([tried(50, 0.15, 0.1)], 0.0, LIMITS).tried
    assert found.slowdown + found.error < ALLOWED
    assert found.slowdown_max == pytest.approx(0.12)


def searches(limits):
    """Searches on 12 machines with 6 % of noise: how many swap nothing, how much they save, how many are too slow."""
    nothing, saved, slow = 0, [], 0
    for seed in range(SEARCHES):
        plant, profiled, calibrated = machine(seed % 12, noise=0.06)
        plant.reseed(1000 + seed)
        planned, _ = machines.run(plant, profiled, calibrated, 60, limits=limits, max_slowdown=ALLOWED)
        nothing += not planned.plan.swaps
        saved.append(1 - planned.plan.peak_bytes / planned.plan.unswapped_peak_bytes)
        slow += slowdown(plant, planned) > ALLOWED + 0.01
    return nothing, sum(saved) / len(saved), slow


def test_noise_costs_less_memory_than_if_each_plan_is_estimated_alone():
    nothing, saved, slow = searches(LIMITS)
    alone_nothing, alone_saved, _ = searches(EACH_ALONE)
    assert nothing <= alone_nothing
    assert saved > alone_saved
    assert slow <= SEARCHES // 20
