"""Plans that swap and recompute: their promises on any trace, and when nothing is dropped."""

import math

import naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan import Link, fastest_plan, joint_bound, least_feasible_limit, least_memory_plan, unswapped_bytes
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

BANDWIDTHS = st.sampled_from([0.5, 2.0, 20.0, math.inf])


def limit_at(trace, part):
    least = max(1, least_feasible_limit(trace))
    return least + int(part * max(0, max(unswapped_bytes(trace), default=0) - least))


def check(trace, link, limit):
    """The plan is what its rows say, keeps the limit, and is between the bound and the plan that swaps alone."""
    plan = fastest_plan(trace, link, limit)
    swaps, dropped = [tuple(swap) for swap in plan.swaps], {row.id for row in plan.recomputes}
    finish = naive.timing(trace, swaps, link.out_bandwidth, link.in_bandwidth, link.latency, dropped)[2]
    assert plan.step_seconds == (finish[-1] if finish else 0.0)
    assert plan.peak_bytes == max(naive.joint_resident(trace, swaps, dropped), default=0) <= limit
    alone = fastest_plan(trace, link, limit, recompute=False)
    assert alone.recomputes == ()
    assert plan.expected_seconds <= alone.expected_seconds * (1 + 1e-12)
    assert plan.bound_seconds <= min(plan.step_seconds, alone.bound_seconds * (1 + 1e-12))
    assert plan.bound_seconds == pytest.approx(min(joint_bound(trace, limit, link), plan.step_seconds), rel=1e-12)
    return plan


@given(naive.traces(), st.integers(0, 1000), BANDWIDTHS, st.floats(0, 1), st.sampled_from([0.0, 0.25]))
@settings(deadline=None, max_examples=60)
def test_within_the_limit_and_never_slower_than_by_swapping_alone(trace, seed, bandwidth, part, latency):
    trace = naive.with_recipes(trace, seed)
    check(trace, Link(bandwidth, 2 * bandwidth, latency), limit_at(trace, part))


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3))])
@pytest.mark.long
def test_larger_traces_keep_the_promises_too(seed):
    trace = naive.with_recipes(naive.random_trace(seed, 120, 60), seed)
    for part in (0.0, 0.3):
        check(trace, Link(40.0, 40.0, 0.0, 0.01 * (seed % 2)), limit_at(trace, part))


def test_the_same_call_gives_the_same_plan():
    trace = naive.with_recipes(naive.random_trace(9, 40, 20), 9)
    limit = limit_at(trace, 0.1)
    assert (
        fastest_plan(trace, Link(20.0, 20.0), limit).to_dict() == fastest_plan(trace, Link(20.0, 20.0), limit).to_dict()
    )


@given(naive.traces(), st.integers(0, 1000), st.sampled_from([0.0, 0.05, 0.5]), BANDWIDTHS)
@settings(deadline=None, max_examples=25)
def test_the_slowdown_is_kept(trace, seed, slowdown, bandwidth):
    trace = naive.with_recipes(trace, seed)
    plan = least_memory_plan(trace, Link(bandwidth, bandwidth), slowdown)
    assert plan.expected_seconds <= plan.compute_seconds * (1 + slowdown) * (1 + 1e-9)
    assert plan.bound_seconds <= plan.step_seconds


def hidden_or_not(count=12):
    """Return a step whose tensors can be swapped without a wait over a link of 40 B/s."""
    nodes = tuple(Node(f"n{k}", 1.0, k >= count) for k in range(2 * count))
    tensors = tuple(
        SavedTensor(i, 20, i, i, i, 2 * count - 1 - i, 2 * count - 1 - i, Recompute(0.01, (i - 1,) if i else ()))
        for i in range(count)
    )
    return Trace(nodes, (0,) * (2 * count), tensors)


def test_nothing_is_dropped_where_swapping_hides_everything():
    trace = hidden_or_not()
    plan = fastest_plan(trace, Link(40.0, 40.0), 80)
    assert plan.swaps
    assert plan.recomputes == ()
    assert plan.step_seconds == plan.compute_seconds


def test_nothing_is_dropped_where_the_step_fits():
    trace = hidden_or_not()
    plan = fastest_plan(trace, Link(1.0, 1.0), max(unswapped_bytes(trace)) + 1)
    assert (plan.swaps, plan.recomputes) == ((), ())
    assert "nothing is swapped or recomputed: the step fits as it is" in plan.explain()


def test_over_a_slow_link_what_is_cheap_is_dropped():
    trace = hidden_or_not()
    alone = fastest_plan(trace, Link(2.0, 2.0), 80, recompute=False)
    plan = fastest_plan(trace, Link(2.0, 2.0), 80)
    assert plan.recomputes
    assert plan.step_seconds < plan.compute_seconds + 0.15 < alone.step_seconds


def test_less_memory_within_a_slowdown():
    trace, link = hidden_or_not(), Link(2.0, 2.0)
    plan = least_memory_plan(trace, link, 0.01)
    assert plan.peak_bytes < least_memory_plan(trace, link, 0.01, recompute=False).peak_bytes
    assert plan.recomputes


def test_no_limit_becomes_feasible():
    trace = hidden_or_not()
    least = least_feasible_limit(trace)
    with pytest.raises(ValueError, match="no plan keeps"):
        fastest_plan(trace, Link(1.0, 1.0), least - 1)
    assert fastest_plan(trace, Link(1.0, 1.0), least).peak_bytes == least
