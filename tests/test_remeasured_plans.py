"""After a search, a plan that was rejected only because its margin of error was wide is measured again."""

import logging
from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import plant as machines
import pytest
from test_plan_search import machine, slowdown

from offload.control import promise
from offload.control.limits import LIMITS
from offload.control.phase import Phase
from offload.control.plan_search import PlanSearch
from offload.control.planned_step import PlannedStep
from offload.control.search_end import last_plan
from offload.control.step_cost import StepCost
from offload.control.tried_plan import TriedPlan, most_promising
from offload.control.watch import Watch
from offload.devices.allocator import LargeBlocks
from offload.plan import Link, Swap, make_plan
from offload.plan.trace import Node, SavedTensor, Trace
from offload.units import format_bytes

ALLOWED = 0.05
PEAK = 1000
GAIN = 10
SOON = replace(LIMITS, remeasure_steps=45)
NEVER = replace(SOON, remeasure_gain=inf)
WORTH = replace(LIMITS, worth_hooks=0.05, worth_bytes=0)


def plan_of(peak_bytes, unswapped_peak_bytes=PEAK, state=None):
    return SimpleNamespace(
        peak_bytes=peak_bytes,
        unswapped_peak_bytes=unswapped_peak_bytes,
        state=state,
        swaps=(peak_bytes,),
        recomputes=(),
    )


def tried(peak_bytes, slowdown, error):
    """A plan with this peak, and what is estimated of it."""
    plan = plan_of(peak_bytes)
    return TriedPlan(plan, slowdown, error, 0.05, 8, 1.0, 0.0, slowdown, error)


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        ([(500, 0.04, 0.02)], 0),
        ([(500, 0.04, 0.02), (300, 0.045, 0.02)], 1),  # 0.69 × 400 and 0.6 × 600 bytes
        ([(500, 0.04, 0.02), (300, 0.09, 0.02)], 0),  # 0.02 × 600 bytes
        ([(500, 0.02, 0.01)], None),  # it is kept already
        ([(950, 0.04, 0.02)], None),  # it needs more than the present plan
        ([(890, 0.04, 0.02)], None),  # 0.69 × 10 bytes
        ([(500, 0.11, 0.02)], None),
        ([(500, 0.06, 0.0)], None),
        ([], None),
    ],
)
def test_the_plan_with_the_largest_expected_gain_is_chosen(plans, chosen):
    rows = [tried(*each) for each in plans]
    found = most_promising(rows, plan_of(900), ALLOWED, GAIN, WORTH)
    assert found is (rows[chosen] if chosen is not None else None)


def test_a_plan_whose_peak_cannot_be_compared_or_that_is_not_worth_its_hooks_is_not_chosen():
    row, little = tried(500, 0.04, 0.02), tried(965, 0.04, 0.02)
    assert most_promising([row], plan_of(900), ALLOWED, GAIN, WORTH) is row
    assert most_promising([row], plan_of(900, PEAK + 1), ALLOWED, GAIN, WORTH) is None  # more memory is in use now
    assert most_promising([row], plan_of(900, state="other state"), ALLOWED, GAIN, WORTH) is None
    assert most_promising([little], plan_of(PEAK), ALLOWED, GAIN, WORTH) is None
    assert most_promising([little], plan_of(PEAK), ALLOWED, GAIN, replace(WORTH, worth_hooks=0.03)) is little


def test_two_measurements_count_by_their_steps():
    plan = SimpleNamespace()
    later = TriedPlan(plan, 0.02, 0.0, 0.01, 6, 10.0, 0.1).pooled_with(TriedPlan(plan, 0.06, 0.0, 0.03, 2, 11.0, 0.4))
    assert (later.measured, later.reference_steps) == (pytest.approx(0.03), 8)
    assert later.deviation == pytest.approx(((6 * 0.01**2 + 2 * 0.03**2) / 8) ** 0.5)
    assert (later.compute_seconds, later.unexplained_seconds) == (10.0, pytest.approx(0.2))  # explained: 0.1, as before


def judged(search, plan, ratio, *, keeps_all=False):
    """Judge a plan beside reference steps of one second; how many pairs of steps it took."""
    search.forget_steps()
    steps = []
    for count in range(1, LIMITS.judged_steps + 1):
        steps.append(StepCost(ratio, (ratio / 4,) * 4, ratio, ratio))
        search.references.append(StepCost(1.0, (0.25,) * 4, 1.0, 1.0))
        if search.judge(plan, steps, ALLOWED, keeps_all=keeps_all) is not None:
            return count
    return None


@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_plan_that_is_measured_again_takes_all_steps_and_is_judged_by_both(keeps_all):
    """Unless its reference steps are of the other kind now: then only by the new ones."""
    nodes = tuple(Node(f"n{k}", 0.25, k > 1) for k in range(4))
    trace = Trace(nodes, (0,) * 4, (SavedTensor(0, 8, 0, 0, 0, 3, 3),))
    plan = make_plan(trace, Link(1e9, 1e9), [Swap(0, 1, 2)])
    search = PlanSearch(replace(LIMITS, plan_spread=1000.0, deviation_min=0.0))
    assert judged(search, plan, 1.08) == 3
    search.is_settled = True
    search.watch.looks.append(0.2)
    search.watch.interval = LIMITS.recheck_steps_max
    search.reopen(plan)
    assert (search.is_settled, list(search.watch.looks), search.watch.interval) == (False, [], LIMITS.recheck_steps)
    assert judged(search, replace(plan, refusals={"why": 1}), 1.02, keeps_all=keeps_all) == LIMITS.judged_steps
    [found] = search.tried
    pairs = LIMITS.judged_steps + (0 if keeps_all else 3)
    measured = 0.02 if keeps_all else (8 * 0.02 + 3 * 0.08) / 11
    assert (found.measured, found.reference_steps) == (pytest.approx(measured), pairs)


def test_the_steps_at_which_it_may_be_measured_again_double():
    first = LIMITS.remeasure_steps
    watch, found = Watch(LIMITS, ended_at=30), []
    for step in range(30, 9 * first):
        if watch.is_remeasuring_due(step):
            found.append(step)
            watch.ended_at = step + 2 * LIMITS.judged_steps
    assert found == [first, 2 * first, 4 * first, 8 * first]


def test_a_search_that_ends_late_waits_for_the_next_of_these_steps():
    watch = Watch(LIMITS, ended_at=5000)
    assert [watch.is_remeasuring_due(step) for step in (8191, 8192)] == [False, True]


def run(seed, steps, limits=SOON, noise=0.06, **options):
    """Train on one of 12 simulated machines.

    In most trainings no plan is measured again. The tests use seeds with which one is.
    """
    plant, profiled, calibrated = machine(seed % 12, noise=noise)
    plant.reseed(2000 + seed)
    planned, phase = machines.run(plant, profiled, calibrated, steps, limits=limits, max_slowdown=ALLOWED, **options)
    return plant, planned, phase


@pytest.mark.parametrize("again", [0.04, 0.08])
def test_if_it_is_rejected_the_plan_before_returns_although_its_estimate_has_grown(again):
    before, other = tried(800, 0.046, 0.005), tried(500, again, 0.005)
    search = PlanSearch(LIMITS)
    search.reopen(before.plan)
    search.tried = [before, other]
    planned, options = SimpleNamespace(search=search), SimpleNamespace(max_slowdown=ALLOWED, memory_limit=None)
    assert last_plan(planned, options, LIMITS) is (other.plan if again < ALLOWED else before.plan)
    search.restart()
    assert search.plan_before is None


def test_tensors_that_were_late_in_another_plan_do_not_change_it(monkeypatch):
    read, follow = PlannedStep.read_measurements, PlannedStep.follow
    followed = []

    def read_and_wait(planned, counts):
        read(planned, counts)
        if planned.search.is_settled:
            planned.late = {swap.id: 1.0 for swap in planned.plan.swaps}

    def note(planned, plan, limit_bytes):
        followed.append((planned.search.plan_before is not None, bool(planned.late)))
        follow(planned, plan, limit_bytes)

    monkeypatch.setattr(PlannedStep, "read_measurements", read_and_wait)
    monkeypatch.setattr(PlannedStep, "follow", note)
    run(9, 120)
    assert (True, False) in followed
    assert (True, True) not in followed


def test_a_plan_that_has_become_too_slow_is_searched_anew_instead(monkeypatch, caplog):
    """Another program slows all steps but those that the plan is compared with."""
    monkeypatch.setattr(promise, "most_promising", lambda tried, *_: tried[0])
    caplog.set_level(logging.INFO, "offload")
    every = LIMITS.recheck_steps

    def neighbour(number):
        plant.busy = 1.5 if 30 < number < 5 * every and (number + 1) % every else 1.0

    plant, profiled, calibrated = machine(3, noise=0.06)  # there the search ends before step 30
    limits = replace(LIMITS, remeasure_steps=3 * every)  # at the third comparison
    machines.run(plant, profiled, calibrated, 3 * every + 2, neighbour, limits=limits, max_slowdown=ALLOWED)
    assert "searching again" in caplog.text
    assert "measuring a plan again" not in caplog.text


@pytest.mark.parametrize("seed", [27, 45])
def test_a_long_training_gets_the_plan_that_a_short_search_could_not_prove(seed, caplog):
    _, before, _ = run(seed, 300, NEVER, noise=0.08)
    caplog.set_level(logging.INFO, "offload")
    plant, planned, phase = run(seed, 300, noise=0.08)
    assert planned.plan.peak_bytes < 0.9 * before.plan.peak_bytes
    assert slowdown(plant, planned) <= ALLOWED
    assert (planned.search.is_settled, phase) == (True, Phase.STEADY)
    again = [record.getMessage() for record in caplog.records if record.getMessage().startswith("measuring a plan")]
    peaks = [format_bytes(each.plan.peak_bytes) for each in (planned, before)]
    assert again[0].startswith(f"measuring a plan again, with a peak of {peaks[0]} instead of {peaks[1]}: it was ")


@pytest.mark.parametrize("seed", [2, 19])
def test_a_plan_that_is_too_slow_again_is_followed_by_the_one_before(seed, caplog):
    _, before, _ = run(seed, 300, NEVER)
    caplog.set_level(logging.INFO, "offload")
    _, planned, phase = run(seed, 300)
    assert (planned.plan.swaps, phase) == (before.plan.swaps, Phase.STEADY)
    assert "measuring a plan again" in caplog.text
    assert f"back to a plan with a peak of {format_bytes(before.plan.peak_bytes)}" in caplog.text.split("again", 1)[1]


@pytest.mark.parametrize("memory_limit", [None, 1 << 50])
def test_it_may_be_measured_again_after_a_search_that_ended_without_swaps(memory_limit, monkeypatch):
    """With a limit, malloc returns blocks at once while the plan swaps."""
    returned = []
    monkeypatch.setattr(LargeBlocks, "return_at_once", lambda blocks, *, wanted: returned.append(wanted))
    monkeypatch.setattr(promise, "most_promising", lambda tried, *_: tried[0])
    plant, profiled, calibrated = machine(1)
    plant.link = replace(plant.link, swap_seconds=0.2 * plant.compute_seconds)
    believed = replace(calibrated, swap_seconds=0.0)
    options = {"max_slowdown": ALLOWED, "memory_limit": memory_limit}
    planned, phase = machines.run(plant, profiled, believed, 89, limits=SOON, **options)
    assert (planned.plan.swaps, phase) == ((), Phase.STEADY if memory_limit else Phase.UNHOOKED)
    [first, *_] = [number for number, (is_reference, _) in enumerate(plant.steps) if is_reference and number > 45]
    assert 45 < first <= LIMITS.recheck_steps + 1
    assert max(each.reference_steps for each in planned.search.tried) >= LIMITS.judged_steps
    changes = [one for one, other in pairwise([*returned, None]) if one != other]
    assert changes == ([True, False, True, False] if memory_limit else [False])


def test_most_steps_are_steady():
    """A plan that is measured again takes its first step and eight of each kind, each time after twice as many."""
    for seed in (2, 6, 9, 18, 19):
        late = []
        for limits in (NEVER, SOON):
            plant, *_ = run(seed, 400, limits)
            late.append(sum(is_reference for number, (is_reference, _) in enumerate(plant.steps) if number > 45))
        times = sum(SOON.remeasure_steps << count < 400 for count in range(9))
        assert late[0] + LIMITS.judged_steps <= late[1] <= times * LIMITS.judged_steps + 400 // LIMITS.recheck_steps


@pytest.mark.parametrize("seed", [2, 18])
def test_a_memory_limit_holds_meanwhile(seed, caplog):
    _, planned, _ = run(seed, 300)
    limit = int(1.05 * planned.plan.peak_bytes)
    caplog.set_level(logging.INFO, "offload")
    plant, planned, _ = run(seed, 300, memory_limit=limit)
    assert "measuring a plan again" in caplog.text
    assert all(plan.peak_bytes <= limit for plan in [planned.plan, *plant.plans.values()])
