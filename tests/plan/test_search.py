"""The planner: its promises on any trace, its corners, and the knobs set by hand."""

import math
import time
import warnings
from itertools import pairwise
from pathlib import Path

import naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_rows import one_in

from offload.plan import (
    InfeasibleLimitError,
    Link,
    Swap,
    cut_bound,
    fastest_plan,
    least_feasible_limit,
    least_memory_plan,
    make_plan,
    manual_plan,
    unswapped_bytes,
)
from offload.plan.trace import Node, SavedTensor, Trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
NOISE = 1.005
BANDWIDTHS = st.sampled_from([0.5, 2.0, 5.0, 20.0, math.inf])


def limit_at(trace, part):
    least = max(1, least_feasible_limit(trace))
    return least + int(part * max(0, max(unswapped_bytes(trace), default=0) - least))


@given(naive.traces(), BANDWIDTHS, BANDWIDTHS, st.floats(0, 1), st.sampled_from([0.0, 0.25]))
@settings(deadline=None)
def test_never_over_the_limit_never_under_the_bound(trace, out_bandwidth, in_bandwidth, part, latency):
    limit = limit_at(trace, part)
    link = Link(out_bandwidth, in_bandwidth, latency)
    plan = fastest_plan(trace, link, limit)
    swaps = [tuple(swap) for swap in plan.swaps]
    assert max(naive.resident(trace, swaps), default=0) == plan.peak_bytes <= max(limit, 0)
    finish = naive.timing(trace, swaps, out_bandwidth, in_bandwidth, latency)[2]
    assert plan.step_seconds == (finish[-1] if finish else 0.0)
    assert plan.bound_seconds <= plan.step_seconds
    assert plan.bound_seconds == pytest.approx(naive.bound(trace, limit, out_bandwidth, in_bandwidth), rel=1e-12)
    assert plan.gap >= 0


@given(naive.traces(), BANDWIDTHS, st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_a_higher_limit_costs_no_time(trace, bandwidth, low, high):
    link = Link(bandwidth, bandwidth)
    low, high = sorted((limit_at(trace, low), limit_at(trace, high)))
    assert fastest_plan(trace, link, high).step_seconds <= NOISE * fastest_plan(trace, link, low).step_seconds


@given(naive.traces(), st.floats(0, 1), st.floats(0.5, 20), st.floats(1, 4))
@settings(deadline=None)
def test_a_faster_link_costs_no_time(trace, part, bandwidth, factor):
    limit = limit_at(trace, part)
    slow, fast = Link(bandwidth, bandwidth), Link(bandwidth * factor, bandwidth * factor)
    assert fastest_plan(trace, fast, limit).step_seconds <= NOISE * fastest_plan(trace, slow, limit).step_seconds


@given(naive.traces(), st.floats(0, 1))
@settings(deadline=None)
def test_an_infinite_link_costs_nothing(trace, part):
    plan = fastest_plan(trace, Link(math.inf, math.inf), limit_at(trace, part))
    assert plan.step_seconds == plan.compute_seconds


@given(naive.traces(), st.sampled_from([0.0, 0.05, 0.5]), BANDWIDTHS)
@settings(deadline=None, max_examples=50)
def test_the_slowdown_is_kept(trace, slowdown, bandwidth):
    plan = least_memory_plan(trace, Link(bandwidth, bandwidth), slowdown)
    assert plan.step_seconds <= plan.compute_seconds * (1 + slowdown) * (1 + 1e-9)
    assert plan.peak_bytes <= plan.unswapped_peak_bytes
    assert plan.bound_seconds <= plan.step_seconds


@given(naive.traces(), st.floats(0, 1))
@settings(deadline=None, max_examples=30)
def test_the_same_call_gives_the_same_plan(trace, part):
    limit = limit_at(trace, part)
    assert fastest_plan(trace, Link(2.0, 3.0), limit).to_dict() == fastest_plan(trace, Link(2.0, 3.0), limit).to_dict()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_larger_traces_keep_the_promises_too(seed):
    trace = naive.random_trace(seed, 120, 60)
    link = Link(40.0, 40.0)
    steps = []
    for part in (0.0, 0.1, 0.3, 1.0):
        plan = fastest_plan(trace, link, limit_at(trace, part))
        assert plan.peak_bytes <= limit_at(trace, part)
        assert plan.bound_seconds <= plan.step_seconds
        steps.append(plan.step_seconds)
    assert steps[-1] == plan.compute_seconds
    assert all(later <= NOISE * sooner for sooner, later in pairwise(steps)), steps


def test_the_plan_does_not_depend_on_the_clock(monkeypatch):
    trace = naive.random_trace(9, 120, 60)
    first = fastest_plan(trace, Link(40.0, 40.0), limit_at(trace, 0.1))
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(time, "process_time", lambda: float(next(ticks)))
    assert fastest_plan(trace, Link(40.0, 40.0), limit_at(trace, 0.1)).swaps == first.swaps


@pytest.mark.parametrize("nodes", [(), (Node("one", 1.5, False),)])
def test_traces_with_nothing_to_swap(nodes):
    trace = Trace(nodes, (3,) * len(nodes), ())
    total = sum(node.seconds for node in nodes)
    for plan in (
        fastest_plan(trace, Link(1.0, 1.0), 3),
        least_memory_plan(trace, Link(1.0, 1.0), 0.05),
        manual_plan(trace, Link(1.0, 1.0), -1),
    ):
        assert (plan.swaps, plan.step_seconds, plan.compute_seconds, plan.gap) == ((), total, total, 0.0)
        assert "nothing is swapped or recomputed" in plan.explain()


def one_tensor(size=10, seconds=1.0):
    nodes = tuple(Node(f"n{k}", seconds, k > 2) for k in range(6))
    return Trace(nodes, (5, 5, 5, 12, 5, 5), (SavedTensor(7, size, 0, 0, 0, 5, 5),))


def test_one_tensor_leaves_and_returns():
    plan = fastest_plan(one_tensor(), Link(10.0, 10.0), 15)
    assert plan.swaps == (Swap(7, 2, 4),)
    assert (plan.step_seconds, plan.peak_bytes, plan.unswapped_peak_bytes, plan.host_bytes) == (6.0, 15, 22, 10)


def test_nodes_of_no_length():
    plan = fastest_plan(one_tensor(seconds=0.0), Link(10.0, 10.0), 15)
    assert (plan.step_seconds, plan.bound_seconds) == (2.0, 1.4)  # 10 bytes out and in; 7 of them had to move
    assert plan.compute_seconds == 0.0


def test_a_tensor_larger_than_the_limit_is_infeasible():
    with pytest.raises(InfeasibleLimitError) as caught:
        fastest_plan(one_tensor(size=100), Link(1.0, 1.0), 50)
    assert caught.value.least_limit_bytes == 105
    assert fastest_plan(one_tensor(size=100), Link(1.0, 1.0), 105).peak_bytes == 105


@pytest.mark.parametrize(
    ("limit", "why"), [(22, "every tensor stays in device memory"), (23, "the step fits as it is")]
)
def test_a_step_that_fits_is_left_alone(limit, why):
    """Without a limit, a plan has its own peak as the limit: then it is not said that the step fits."""
    plan = fastest_plan(one_tensor(), Link(10.0, 10.0), limit)
    assert plan.swaps == ()
    assert plan.step_seconds == plan.compute_seconds == plan.bound_seconds
    assert f"nothing is swapped or recomputed: {why}: 22 B at its peak" in plan.explain()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        fastest_plan(one_tensor(), Link(1.0, 1.0), limit)


@pytest.mark.parametrize("slowdown", [-0.1, math.nan, math.inf])
def test_a_slowdown_that_is_no_fraction_is_refused(slowdown):
    with pytest.raises(ValueError, match="max_slowdown"):
        least_memory_plan(one_tensor(), Link(1.0, 1.0), slowdown)


def test_the_least_memory_is_least():
    plan = least_memory_plan(one_tensor(), Link(10.0, 10.0), 0.0)
    assert (plan.peak_bytes, plan.step_seconds) == (15, 6.0)
    slow = Link(0.1, 0.1)
    assert least_memory_plan(one_tensor(), slow, 0.05).swaps == ()
    assert least_memory_plan(one_tensor(), slow, 100.0).peak_bytes == 15


@given(naive.traces(), st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([0.0, 0.001, 0.1]))
@settings(deadline=None)
def test_what_swaps_slow_down_counts_as_slowdown(trace, slowdown, swap_seconds, byte_seconds):
    link = Link(20.0, 20.0, 0.0, swap_seconds, byte_seconds)
    plan = least_memory_plan(trace, link, slowdown)
    moved = sum(tensor.bytes for tensor in trace.tensors if tensor.id in {swap.id for swap in plan.swaps})
    expected = plan.step_seconds + len(plan.swaps) * swap_seconds + moved * byte_seconds
    assert plan.expected_seconds == pytest.approx(expected, rel=1e-12)
    assert plan.expected_seconds <= plan.compute_seconds * (1 + slowdown) * (1 + 1e-9)
    limited = fastest_plan(trace, link, limit_at(trace, slowdown))
    assert limited.peak_bytes <= max(limit_at(trace, slowdown), 0)


def test_of_two_ways_to_keep_the_limit_the_cheaper_is_taken():
    nodes = tuple(Node(f"n{k}", 100.0, k > 3) for k in range(8))
    trace = Trace(
        nodes, (0, 0, 0, 5, 0, 0, 0, 0), (SavedTensor(0, 10, 0, 0, 0, 7, 7), SavedTensor(1, 6, 1, 1, 1, 6, 6))
    )
    plan = fastest_plan(trace, Link(1.0, 1.0, byte_seconds=1.0), 16)
    assert [swap.id for swap in plan.swaps] == [1]
    assert "slowed by swaps 6.000 s" in plan.explain()
    least = least_memory_plan(trace, Link(1.0, 1.0, byte_seconds=1.0), 0.01)
    assert ([swap.id for swap in least.swaps], least.peak_bytes) == ([1], 16)
    assert least_memory_plan(trace, Link(1.0, 1.0, swap_seconds=50.0), 0.01).swaps == ()


def test_the_limit_goes_before_the_slowdown():
    slow = Link(0.5, 0.5)
    with pytest.warns(UserWarning, match="max_slowdown=0.05 is not met"):
        plan = least_memory_plan(one_tensor(), slow, 0.05, limit_bytes=15)
    assert plan.peak_bytes == 15
    with pytest.raises(InfeasibleLimitError):
        least_memory_plan(one_tensor(), slow, 0.05, limit_bytes=10)


def staircase():
    """Return four tensors, the first the longest-lived, over four forward and four backward nodes of a second each."""
    nodes = tuple(Node(f"n{k}", 1.0, k > 3) for k in range(8))
    return Trace(nodes, (0,) * 8, tuple(SavedTensor(10 + i, 4, i, i, i, 7 - i, 7 - i) for i in range(4)))


@pytest.mark.parametrize(
    ("count", "ids"), [(0, []), (1, [10]), (2, [10, 11]), (-1, [10, 11, 12, 13]), (99, [10, 11, 12, 13])]
)
def test_by_hand_the_longest_lived_swap(count, ids):
    plan = manual_plan(staircase(), Link(8.0, 8.0), count, 0)
    assert [swap.id for swap in plan.swaps] == ids
    assert plan.step_seconds >= plan.compute_seconds


@pytest.mark.parametrize(("lead", "prefetch"), [(0, 7), (1, 6), (3, 4), (50, 4)])
def test_by_hand_the_lead_counts_backward_nodes(lead, prefetch):
    plan = manual_plan(staircase(), Link(8.0, 8.0), 1, lead)
    assert plan.swaps == (Swap(10, 2, prefetch),)


def test_by_hand_auto_stalls_for_no_copy():
    plan = manual_plan(staircase(), Link(8.0, 8.0), -1, "auto")
    assert plan.step_seconds == plan.compute_seconds
    assert plan.swaps[0] == Swap(10, 2, 6)


def test_by_hand_a_limit_is_a_warning():
    trace = staircase()
    with pytest.warns(UserWarning, match="the peak will be 16 bytes, the limit is 15 bytes"):
        manual_plan(trace, Link(8.0, 8.0), 0, limit_bytes=15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manual_plan(trace, Link(8.0, 8.0), 0, limit_bytes=16)


@pytest.mark.parametrize(("count", "lead", "name"), [(-2, 1, "n_tensors"), (1, -1, "lb")])
def test_by_hand_senseless_numbers_are_refused(count, lead, name):
    with pytest.raises(ValueError, match=name):
        manual_plan(staircase(), Link(1.0, 1.0), count, lead)


def test_explain_names_what_moves_and_what_it_costs():
    hidden = fastest_plan(one_tensor(), Link(10.0, 10.0), 15).explain()
    assert "n0 (tensor 7), 10 B: released at node 2 (n2), prefetched at node 4 (n4), 1 node before" in hidden
    assert "hidden" in hidden
    late = fastest_plan(one_tensor(), Link(5.0, 2.5), 15).explain()
    assert "compute waits" in late
    assert "for the copy-in" in late


def test_a_plan_without_limit_is_certified_at_its_own_peak():
    trace, link = staircase(), Link(1.0, 1.0)
    plan = make_plan(trace, link, [Swap(10, 5, 6)])
    assert plan.limit_bytes == plan.peak_bytes == 16
    assert plan.bound_seconds == cut_bound(trace, 16, link)


@pytest.mark.parametrize("name", one_in(2, ["bert_base", "inceptionv3", "resnet152", "senet154", "vit"]))
def test_recorded_traces(name):
    path = SHARED / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the recorded traces are not at {SHARED}")
    trace = Trace.load(path)
    link = Link(15.754e9, 15.754e9)
    for part in (0.5, 0.03):
        limit = limit_at(trace, part)
        plan = fastest_plan(trace, link, limit)
        assert plan.peak_bytes <= limit
        assert plan.bound_seconds <= plan.step_seconds
        assert plan.gap <= 0.012
