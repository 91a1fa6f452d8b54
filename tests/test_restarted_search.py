"""A plan that has become too slow after its search: the search starts again, and measures this plan first."""

from dataclasses import replace

import plant as machines
import pytest
from test_plan_search import SETTLED_BY, STEPS, machine, slowdown

from offload.control.limits import LIMITS
from offload.control.planned_step import PlannedStep


def test_a_settled_plan_that_a_neighbour_slows_is_searched_anew():
    plant, profiled, calibrated = machine(3)
    quiet = plant.link

    def neighbour(number):
        if number == STEPS:
            plant.link = replace(quiet, byte_seconds=quiet.byte_seconds + 0.5 * plant.compute_seconds / copied)

    copied = sum(tensor.bytes for tensor in plant.trace.tensors)
    steps = STEPS + 6 * LIMITS.recheck_steps
    planned, _ = machines.run(plant, profiled, calibrated, steps, neighbour, max_slowdown=0.05)
    assert planned.search.is_settled
    assert slowdown(plant, planned) <= 0.05
    looks = [number for number, (is_reference, _) in enumerate(plant.steps) if is_reference and number > SETTLED_BY]
    assert len(looks) <= 3 + 2 * LIMITS.measurements + (LIMITS.replans + 1) * LIMITS.measurements + 6


def run_beside_disturbed_comparisons():
    """Another program slows all steps but those that the plan is compared with, until the fourth comparison."""
    plant, profiled, calibrated = machine(3)
    every = LIMITS.recheck_steps

    def neighbour(number):
        step = number + 1
        plant.busy = 1.3 if SETTLED_BY < step < 4 * every and step % every else 1.0

    machines.run(plant, profiled, calibrated, 6 * every, neighbour, max_slowdown=0.05)
    return plant


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_search_that_starts_again_measures_the_present_plan_first(is_guarded, monkeypatch):
    """The guard: older measurements are forgotten."""
    if not is_guarded:
        monkeypatch.setattr(PlannedStep, "_forget_measured_steps", lambda planned: None)
    plant, every = run_beside_disturbed_comparisons(), LIMITS.recheck_steps
    references = [number for number, (is_reference, _) in enumerate(plant.steps) if is_reference and number >= STEPS]
    assert references[:4] == [count * every - 1 for count in range(1, 5)]
    plans = [number for number in plant.plans if number >= STEPS]
    assert (not plans) == is_guarded
    assert len(references) >= 4 + LIMITS.measurements_before_judging or not is_guarded


def test_nodes_that_have_become_slower_are_planned_with_in_the_next_search():
    """Every step takes twice as long from step 60 on, and copies cost more."""
    plant, profiled, calibrated = machine(3)
    copied = sum(tensor.bytes for tensor in plant.trace.tensors)

    def neighbour(number):
        if number == STEPS:
            plant.busy = 2.0
            plant.link = replace(plant.link, byte_seconds=0.5 * plant.compute_seconds / copied)

    machines.run(plant, profiled, calibrated, STEPS + 8 * LIMITS.recheck_steps, neighbour, max_slowdown=0.05)
    first = next(plan for number, plan in plant.plans.items() if number > STEPS)
    assert first.compute_seconds > 1.5 * plant.compute_seconds


def test_its_reference_steps_are_chosen_anew(monkeypatch):
    """After the search they made copies; in a search they may keep every tensor. All repetitions are allowed again."""
    restart, found = PlannedStep.restart_search, []

    def restart_and_look(planned):
        planned.search.repeats = LIMITS.repeats
        found.append(planned.reference is not None)
        restart(planned)
        found.extend([planned.reference, planned.search.repeats])

    monkeypatch.setattr(PlannedStep, "restart_search", restart_and_look)
    run_beside_disturbed_comparisons()
    assert found == [True, None, 0]
