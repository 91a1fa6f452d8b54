"""How a plan's measured steps are judged beside its reference steps, and what is learned from them."""

from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import plant as machines
import pytest
from test_plan_search import STEPS, machine

from offload.control import measured_slowdown, plan_search
from offload.control.limits import LIMITS
from offload.control.next_plan import goes_too_far, is_worth_trying
from offload.control.plan_search import PlanSearch
from offload.control.planned_step import PlannedStep
from offload.control.step_cost import StepCost
from offload.control.tried_plan import TriedPlan
from offload.plan import Link, Swap, make_plan
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

ALLOWED = 0.05
# A plan's slowdown is what was measured of it, whatever is expected, and its error is that of its own steps.
MEASURED = replace(LIMITS, plan_spread=1000.0, deviation_min=0.0)
EIGHT_UNCERTAIN = [1.1, 1.01, 1.08, 1.04, 1.07, 1.15, 1.11, 1.09]
UNCERTAIN = [*EIGHT_UNCERTAIN, 1.1, 1.01, 1.08, 1.04]  # noise hides whether steps are more than 5 % slower


def recomputing_plan(byte_seconds, *, waits, number=2):
    """A plan that recomputes 10 bytes, with the assumption that each takes `byte_seconds` besides.

    `number`: the tensor's. `waits`: whether the recomputation is over before a copy-in for which computation waits.
    """
    tensors = [
        SavedTensor(0, 4, 0, 0, 0, 7, 7),
        SavedTensor(number, 10, 2, 2, 2, 5, 5, Recompute(0.5 + 10 * byte_seconds, (0,))),
    ]
    if waits:
        tensors.insert(1, SavedTensor(1, 30, 1, 1, 1, 6, 6))
    nodes = tuple(Node(f"n{k}", 1.0, k > 3) for k in range(8))
    trace = Trace(nodes, (0,) * 8, tuple(tensors))
    return make_plan(trace, Link(20.0, 6.0), [Swap(1, 3, 3)] if waits else [], recomputes=[number])


def learned_costs(step_seconds):
    """Seconds that a recomputed byte costs, learned from each of three plans whose steps take this long."""
    search = PlanSearch(LIMITS)
    search.references.extend([StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * LIMITS.measurements)
    steps = [StepCost(step_seconds, (1.0,) * 8, step_seconds, 8.0)] * LIMITS.measurements
    costs = []
    for number in (2, 3, 4):
        plan = recomputing_plan(search.recompute_byte_seconds, waits=False, number=number)
        search.judge(plan, steps, ALLOWED)
        search.learn(Link(20.0, 6.0))
        costs.append(search.recompute_byte_seconds)
    return costs


def test_a_cost_that_a_plan_assumed_is_learned_again():
    """Recomputation is predicted to take 0.5 s, and recording takes 0.1 s more."""
    assert learned_costs(8.6) == pytest.approx([0.01] * 3, rel=0.25)


def test_it_shrinks_with_each_plan_if_it_counts_as_explained(monkeypatch):
    """A mutant."""
    monkeypatch.setattr(plan_search, "assumed_seconds", lambda plan, byte_seconds: 0.0)
    first, second, _ = learned_costs(8.6)
    assert second < 0.75 * first


def test_a_cost_that_takes_the_place_of_a_wait_is_not_learned():
    """Steps take what is predicted, with an assumed cost or without."""
    without, assumed = (recomputing_plan(cost, waits=True).step_seconds for cost in (0.0, 0.05))
    assert without == assumed
    search = PlanSearch(LIMITS, recompute_byte_seconds=0.05)
    search.references.extend([StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * LIMITS.measurements)
    steps = [StepCost(without, (1.0,) * 8, without, 8.0)] * LIMITS.measurements
    search.judge(recomputing_plan(0.05, waits=True), steps, ALLOWED)
    assert search.tried[-1].unexplained_seconds == pytest.approx(0.0)


def test_it_is_learned_if_bytes_are_multiplied_by_their_cost(monkeypatch):
    """A mutant."""
    monkeypatch.setattr(plan_search, "assumed_seconds", lambda plan, byte_seconds: 10 * byte_seconds)
    with pytest.raises(AssertionError):
        test_a_cost_that_takes_the_place_of_a_wait_is_not_learned()


def slowdown_beside_bursts():
    """The slowdown of steps that take 10 % longer, if a burst of another program is in another node of each step.

    The bursts of the plan's steps are longer than those of the reference steps.
    """
    search = PlanSearch(MEASURED)

    def step(node, burst):
        nodes = tuple(1.0 + burst * (number == node) for number in range(8))
        return StepCost(sum(nodes), nodes, sum(nodes), sum(nodes))

    search.references.extend(step(node, 0.1) for node in range(8))
    slowed = [step(node, 0.9) for node in range(8)]
    steps = [replace(cost, step=cost.step + 0.8, own_step=cost.own_step + 0.8) for cost in slowed]
    return search.judge(recomputing_plan(0.0, waits=False), steps, ALLOWED)


def test_bursts_that_are_shorter_than_a_step_are_in_no_slowdown():
    assert slowdown_beside_bursts() == pytest.approx(0.1)


def test_they_are_in_the_slowdown_of_whole_steps(monkeypatch):
    """A mutant."""

    def whole_steps(planned, references, outside, waits):
        return median(map(sum, references)), median(map(sum, planned)) + median(outside)

    monkeypatch.setattr(measured_slowdown, "_seconds", whole_steps)
    assert slowdown_beside_bursts() > 0.19


def test_on_a_shared_processor_cpu_times_are_compared_and_elapsed_times_are_planned_with():
    search = PlanSearch(MEASURED)
    search.references.extend([StepCost(12.0, (1.5,) * 8, 8.0, 8.0)] * LIMITS.measurements)
    assert search.is_shared
    steps = [StepCost(15.0, (1.8,) * 8, 8.4, 8.3)] * LIMITS.measurements
    assert search.judge(recomputing_plan(0.0, waits=False), steps, ALLOWED) == pytest.approx(0.05)
    assert search.reference_node_seconds == [1.5] * 8


def slowdown_beside_waits(waits=frozenset({1, 6})):
    """The slowdown of steps of 9 s, if reference steps wait before nodes 1 and 6, and what is learned.

    The first half of the nodes after a wait takes 30 % longer, the second 15 %.
    """
    search = PlanSearch(MEASURED, waits=waits)
    nodes = (1.0, 1.3, 1.3, 1.3, 1.15, 1.15, 1.3, 1.15)
    search.references.extend([StepCost(sum(nodes), nodes, sum(nodes), sum(nodes))] * LIMITS.judged_steps_max)
    steps = [StepCost(9.0, (1.1,) * 8, 9.0, 8.8)] * LIMITS.judged_steps_max
    return search.judge(recomputing_plan(0.0, waits=False), steps, 0.0), search.reference_node_seconds


def test_the_first_half_of_the_nodes_after_a_wait_takes_no_longer_than_in_the_plans_steps():
    slowdown, nodes = slowdown_beside_waits()
    assert nodes == [1.0, 1.1, 1.1, 1.1, 1.15, 1.15, 1.1, 1.15]
    assert slowdown == pytest.approx(9.0 / sum(nodes) - 1)


def test_where_no_step_waits_reference_steps_alone_count():
    _, nodes = slowdown_beside_waits(frozenset())
    assert nodes == [1.0, 1.3, 1.3, 1.3, 1.15, 1.15, 1.3, 1.15]


def test_a_judged_plan_is_known_after_it_has_been_copied():
    search = PlanSearch(MEASURED)
    search.references.extend([StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * LIMITS.measurements)
    plan = recomputing_plan(0.0, waits=True)
    assert search.judged(plan) is None
    search.judge(plan, [StepCost(8.4, (1.0,) * 8, 8.4, 8.0)] * LIMITS.measurements, ALLOWED)
    copied = search.judged(replace(plan, refusals={"a reason": 1}))
    assert copied is not None
    assert (copied.slowdown, copied.reference_steps) == (pytest.approx(0.05), LIMITS.measurements)
    assert search.judged(recomputing_plan(0.0, waits=False)) is None
    assert search.judged(None) is None


def judged_after(ratios, limits=MEASURED, *, allowed=ALLOWED):
    """The slowdown of a plan whose steps take these multiples of reference steps, and after how many it is known."""
    search = PlanSearch(limits)
    steps = []
    for count, ratio in enumerate(ratios, 1):
        steps.append(StepCost(8.0 * ratio, (ratio,) * 8, 8.0 * ratio, 8.0 * ratio))
        search.references.append(StepCost(8.0, (1.0,) * 8, 8.0, 8.0))
        slowdown = search.judge(recomputing_plan(0.0, waits=False), steps, allowed)
        if slowdown is not None:
            return search, slowdown, count
    return search, None, len(steps)


@pytest.mark.parametrize(
    ("ratios", "slowdown", "count", "kept"),
    [
        ([1.02] * 8, 0.02, 5, True),
        ([1.0499] * 8, 0.0499, 5, True),
        ([1.06] * 8, 0.06, 3, False),
        ([1.1, 1.14, 1.12] * 3, 0.11, 3, False),
        ([0.98, 1.1, 1.04, 1.02] * 2, 0.01, 8, True),
        (UNCERTAIN, 0.04, 12, False),
        ([*EIGHT_UNCERTAIN, 1.03, 1.04, 1.03, 1.04], 0.0375, 12, True),
        ([1.0, 1.1], None, 2, None),
        ([1.01, 1.01, 1.3] + [1.01] * 5, 0.01, 5, True),
        ([1.01, 1.3, 1.3, 1.08] + [1.01] * 4, 0.01, 7, True),
        ([0.5, 0.52, 0.6, 1.0, 1.02, 1.01, 1.0, 1.02, 0.5, 0.52, 0.6, 1.0], 0.0, 12, False),
    ],
)
def test_steps_are_measured_until_noise_can_be_told_from_the_slowdown(ratios, slowdown, count, kept):
    """A plan keeps `max_slowdown` only if its slowdown plus the margin of error does."""
    search, found, steps = judged_after(ratios)
    assert (found, steps) == (pytest.approx(slowdown, abs=1e-6) if slowdown is not None else None, count)
    assert (search.best(ALLOWED) is not None) == bool(kept)
    assert len(search.tried) == (slowdown is not None)


def test_without_the_margin_a_lucky_plan_is_kept():
    """A mutant."""
    limits = replace(MEASURED, standard_errors=0.0, measurements_before_keeping=3)  # two rules less
    search, slowdown, count = judged_after(UNCERTAIN, limits)
    assert (slowdown, count) == (pytest.approx(0.045), 3)
    assert search.best(ALLOWED) is not None


# One of the first three steps is short by chance.
SHORT_BY_CHANCE = [1.0, 1.031, 1.09, 1.06, 1.04, 1.07, 1.06, 1.08, 1.0, 1.031, 1.09, 1.06]
# Three of the first five steps are.
FIVE_SHORT_BY_CHANCE = [1.1, 1.02, 1.08, 1.07, 1.02, 1.08, 1.04, 1.08, 1.1, 1.02, 1.08, 1.07]


@pytest.mark.parametrize(
    ("ratios", "changed", "count", "kept"),
    [
        (SHORT_BY_CHANCE, {}, 12, False),
        (SHORT_BY_CHANCE, {"measurements_before_keeping": 3, "margins_before_keeping": 1.0}, 3, True),
        (FIVE_SHORT_BY_CHANCE, {}, 12, False),
        (FIVE_SHORT_BY_CHANCE, {"margins_before_keeping": 1.0}, 5, True),
        ([1.03] * 8, {}, 5, True),
        ([1.03] * 8, {"measurements_before_keeping": 3}, 3, True),
    ],
)
def test_a_first_plan_is_not_kept_because_some_steps_are_short(ratios, changed, count, kept):
    """Rows with `changed` are mutants."""
    search, _, steps = judged_after(ratios, replace(MEASURED, **changed))
    assert (steps, search.best(ALLOWED) is not None) == (count, kept)


def test_later_plans_are_judged_after_fewer_pairs_of_steps():
    search = PlanSearch(MEASURED)
    assert wanted_references(search) == LIMITS.judged_steps_max
    search, _, _ = judged_after([1.10, 1.16, 1.13])
    search.forget_steps()
    assert wanted_references(search) == LIMITS.judged_steps < LIMITS.judged_steps_max


def wanted_references(search):
    """How many reference steps are due beside many steps of the plan."""
    while search.is_due(plan_steps=100):
        search.begun += 1
        search.references.append(StepCost(8.0, (1.0,) * 8, 8.0, 8.0))
    return search.begun


def test_later_plans_are_kept_after_three_steps():
    search, _, _ = judged_after([1.10, 1.16, 1.13])
    search.forget_steps()
    search.references.extend([StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * 3)
    steps = [StepCost(8.24, (1.03,) * 8, 8.24, 8.24)] * 3
    assert search.judge(recomputing_plan(0.0, waits=True), steps, ALLOWED) is not None
    assert search.best(ALLOWED) is not None


def test_a_first_plan_whose_slowdown_is_not_clear_is_measured_for_twelve_pairs():
    plant, profiled, calibrated = machine(7)
    planned, _ = machines.run(plant, profiled, calibrated, STEPS, max_slowdown=ALLOWED)
    assert [each.reference_steps for each in planned.search.tried] == [LIMITS.judged_steps_max, 3, 3]


def measured_errors(seed, first_factor):
    """The plans of a search: how far what was measured of each may be off."""
    plant, profiled, calibrated = machine(seed)
    plant.first_factor = first_factor
    planned, _ = machines.run(plant, profiled, calibrated, STEPS, max_slowdown=ALLOWED)
    return [each.measured_error for each in planned.search.tried]


@pytest.mark.parametrize("seed", [1, 6])
def test_the_first_step_of_a_plan_does_not_count(seed):
    assert len(measured_errors(seed, 1.0)) > 1
    assert measured_errors(seed, 1.5) == measured_errors(seed, 1.0)


@pytest.mark.parametrize("seed", [1, 6])
def test_otherwise_a_later_plan_would_be_judged_by_it(seed, monkeypatch):
    """A mutant."""
    take_in = PlannedStep._take_in

    def take_in_all(planned, measured, recompute_seconds):
        if not planned.step_seconds:
            planned.costs.append(StepCost.of(measured))
        return take_in(planned, measured, recompute_seconds)

    monkeypatch.setattr(PlannedStep, "_take_in", take_in_all)
    assert measured_errors(seed, 1.5)[1] > 10 * measured_errors(seed, 1.0)[1]


def test_a_program_that_starts_is_seen_in_the_last_reference_steps():
    search = PlanSearch(LIMITS)
    search.references.extend([StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * 5)
    search.references.extend([StepCost(12.0, (1.5,) * 8, 8.0, 8.0)] * 2)
    assert not search.is_shared
    search.references.append(StepCost(12.0, (1.5,) * 8, 8.0, 8.0))
    assert search.is_shared


@pytest.mark.parametrize("disturbed", ["steps", "references", "neither"])
def test_disturbed_steps_of_both_kinds_are_noticed(disturbed):
    even = [StepCost(8.0, (1.0,) * 8, 8.0, 8.0)] * 5
    uneven = even[:2] + [StepCost(12.0, (1.5,) * 8, 12.0, 12.0)] * 3
    search = PlanSearch(LIMITS)
    search.references.extend(uneven if disturbed == "references" else even)
    assert search.are_disturbed(uneven if disturbed == "steps" else even) == (disturbed != "neither")


def tried(saved_bytes, slowdown, error=0.0):
    plan = SimpleNamespace(unswapped_peak_bytes=1000, peak_bytes=1000 - saved_bytes)
    return TriedPlan(plan, slowdown, 0.0, 0.0, 3, 1.0, 0.0, slowdown, error)


@pytest.mark.parametrize(
    ("plans", "least_bytes", "goes_on"),
    [
        ([(500, 0.045)], 0, True),  # 528 at 4.75 %: 5.6 % less memory
        ([(500, 0.0465)], 0, False),  # 511: 2 %
        ([(500, 0.037, 0.007)], 0, False),  # with the margin: 489 at 4.3 %
        ([(500, 0.01)], 480, False),  # no plan needs less than 480
        ([(500, 0.01)], 470, True),
        ([(900, 0.1), (300, 0.01)], 0, True),  # 550 on the line between them
        ([(600, 0.5), (300, 0.01)], 0, False),  # 323
        ([(330, 0.06), (300, 0.0)], 0, False),  # next to one that was too slow
        ([(45, 0.02)], 0, True),  # 90 would be worth the hooks, 45 are not
        ([(45, 0.045)], 0, False),  # 47 would not
        ([(80, 0.0)], 0, True),  # not slower at all
        ([(80, -0.01)], 0, True),
        ([(500, 0.051)], 0, True),  # too slow
    ],
)
def test_another_plan_is_tried_where_it_would_probably_need_much_less_memory(plans, least_bytes, goes_on):
    search = PlanSearch(LIMITS)
    search.tried = [tried(*plan) for plan in plans]
    assert (search.reason_to_move(ALLOWED, least_bytes) is not None) == goes_on


@pytest.mark.parametrize(("error", "aim"), [(0.0, 0.0475), (0.001, 0.0475), (0.006, 0.044), (0.02, 0.04)])
def test_the_more_steps_vary_the_further_below_the_promise_the_next_plan_aims(error, aim):
    search = PlanSearch(LIMITS)
    search.tried = [tried(500, 0.01, error)]
    assert search._likely_saved(ALLOWED) == pytest.approx(500 * aim / (0.01 + error))


@pytest.mark.parametrize(
    ("last", "unexplained_seconds", "predicted", "too_far"),
    [
        (0.02, 0.0, 1.06, True),
        (0.02, 0.0, 1.04, False),
        (0.02, 0.5, 1.06, True),
        (0.02, -0.02, 1.06, False),  # of the last plan, more was predicted than was measured
        (0.06, 0.0, 1.06, False),  # the last plan was too slow: the next one saves less
    ],
)
def test_a_plan_goes_too_far_if_it_is_predicted_to_be_too_slow(last, unexplained_seconds, predicted, too_far):
    search = PlanSearch(LIMITS, tried=[replace(tried(500, last), unexplained_seconds=unexplained_seconds)])
    plan = SimpleNamespace(expected_seconds=predicted, compute_seconds=1.0)
    assert goes_too_far(plan, search.tried[-1], ALLOWED) == too_far


@pytest.mark.parametrize(
    ("last_bytes", "bytes_saved", "worth"),
    [(300, 350, True), (300, 330, False), (300, 200, False), (40, 60, True), (40, 45, False)],
)
def test_a_plan_is_worth_trying_if_it_needs_less_memory_or_alone_is_worth_its_hooks(last_bytes, bytes_saved, worth):
    search = PlanSearch(replace(LIMITS, worth_bytes=1), tried=[tried(last_bytes, 0.01)])
    plan = SimpleNamespace(unswapped_peak_bytes=1000, peak_bytes=1000 - bytes_saved)
    assert is_worth_trying(plan, search.tried[-1].plan, search.limits) == worth
