"""`Watch`: after a search, when a plan is compared again, and when it counts as too slow."""

from itertools import pairwise

import pytest

from offload.control.limits import LIMITS
from offload.control.plan_search import PlanSearch
from offload.control.step_cost import StepCost
from offload.control.tried_plan import TriedPlan
from offload.control.watch import Watch
from offload.plan import Link, make_plan
from offload.plan.trace import Node, Trace

ALLOWED = 0.05
FIRST, MOST = LIMITS.recheck_steps, LIMITS.recheck_steps_max


def looks(watch, slowdowns, start=1, delay=0):
    """Run steps; the numbers of those with a comparison. Each slowdown is known `delay` steps later."""
    found, remaining, known = [], list(slowdowns), []
    for step in range(start, start + 200 * FIRST):
        while known and known[0][0] <= step:
            watch.looks.append(known.pop(0)[1])
        if not remaining:
            break
        if watch.is_due(step, ALLOWED):
            watch.begin()
            found.append(step)
            known.append((step + delay, remaining.pop(0)))
    watch.looks.extend(slowdown for _, slowdown in known)
    return found


@pytest.mark.parametrize("delay", [0, 3])
def test_the_interval_doubles_as_long_as_the_plan_keeps_the_promise(delay):
    steps = looks(Watch(LIMITS), [0.04] * 8, delay=delay)
    distances = [later - earlier for earlier, later in pairwise(steps)]
    assert steps[0] == FIRST
    assert all(later in (earlier, 2 * earlier) for earlier, later in pairwise(distances))
    assert distances[-1] == MOST
    assert all(step % FIRST == 0 for step in steps)  # on each process of a job in the same steps


def test_after_a_comparison_that_was_too_slow_the_next_one_is_soon():
    watch = Watch(LIMITS)
    (*_, last) = looks(watch, [0.04] * 7 + [0.09])
    assert watch.interval == MOST
    assert looks(watch, [0.09, 0.09], start=last + 1) == [last + FIRST, last + 2 * FIRST]
    assert watch.is_broken(ALLOWED)


def test_a_comparison_before_the_first_one_is_due_does_not_make_every_step_due():
    """Such as a reference step of the search whose measurement arrives late."""
    watch = Watch(LIMITS)
    watch.looks.append(0.02)
    steps = looks(watch, [0.02] * 3)
    assert min(later - earlier for earlier, later in pairwise(steps)) >= FIRST


@pytest.mark.parametrize(
    ("slowdowns", "broken"),
    [([0.07] * 3, True), ([0.07] * 2, False), ([0.07, 0.059, 0.07], False), ([0.01, 0.07, 0.07, 0.07], True)],
)
def test_it_is_broken_if_all_of_the_last_comparisons_say_so(slowdowns, broken):
    watch = Watch(LIMITS)
    looks(watch, slowdowns)
    assert watch.is_broken(ALLOWED) == broken


@pytest.mark.parametrize("keeps_all", [True, False])
def test_a_plan_that_was_judged_by_steps_that_keep_every_tensor_is_compared_with_those(keeps_all):
    trace = Trace((Node("a", 8.0, False),), (0,), ())
    plan = make_plan(trace, Link(1.0, 1.0), ())
    search = PlanSearch(LIMITS)
    search.tried = [TriedPlan(plan, 0.04, 0.0, 0.0, 3, 8.0, 0.0, 0.04, 0.0, keeps_all=keeps_all)]
    steps = [StepCost(8.8, (8.8,), 8.8, 8.8)] * 3
    assert search.compare_with_search(plan, []) == keeps_all
    assert not search.watch.looks
    assert search.compare_with_search(plan, steps) == keeps_all
    assert list(search.watch.looks) == (pytest.approx([0.1]) if keeps_all else [])


def test_that_comparison_is_of_lower_quartiles_too():
    """Other programs slowed three of the last five steps; those before do not count. A second is outside the node."""
    trace = Trace((Node("a", 8.0, False),), (0,), ())
    plan = make_plan(trace, Link(1.0, 1.0), ())
    search = PlanSearch(LIMITS)
    search.tried = [TriedPlan(plan, 0.04, 0.0, 0.0, 3, 8.0, 0.0, 0.04, 0.0, keeps_all=True)]
    nodes = [1.0, 12.0, 8.0, 12.0, 8.0, 12.0]
    search.compare_with_search(plan, [StepCost(each + 1.0, (each,), each + 1.0, each) for each in nodes])
    assert list(search.watch.looks) == pytest.approx([0.125])


def test_a_new_search_begins_with_a_new_watch():
    search = PlanSearch(LIMITS)
    search.watch.looks.append(0.01)
    search.watch.begin()
    assert search.watch.interval == 2 * FIRST
    search.restart()
    assert (search.watch.interval, list(search.watch.looks)) == (FIRST, [])
