"""The cut bound against the same read literally, to the bit; the least feasible limit and what is said about it."""

import math
import pickle

import naive
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan import (
    InfeasibleLimitError,
    Link,
    Swap,
    check_limit,
    cut_bound,
    cut_bounds,
    least_feasible_limit,
    simulate,
    unswapped_bytes,
)
from offload.plan.trace import Node, SavedTensor, Trace


def limits(trace):
    least, peak = naive.least_limit(trace), max(unswapped_bytes(trace), default=0)
    return [least - 1, *(least + (peak - least) * part // 8 for part in range(9))]


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_that_of_the_definition(seed):
    trace = naive.random_trace(seed, 30 + seed, 5 + seed)
    for bandwidths in ((20.0, 33.0), (500.0, 200.0), (math.inf, 3.0)):
        for limit in limits(trace):
            assert cut_bound(trace, limit, Link(*bandwidths)) == naive.bound(trace, limit, *bandwidths), limit


@given(naive.traces(), st.sampled_from([0.3, 2.0, 7.0, math.inf]), st.integers(0, 8))
def test_the_bound_is_that_of_the_definition_on_ties_and_zeros(trace, bandwidth, part):
    limit = limits(trace)[part + 1]
    bounds = cut_bounds(trace, limit, Link(bandwidth, 2.0))
    assert bounds.single == naive.bound(trace, limit, bandwidth, 2.0)
    assert bounds.double >= bounds.single * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_beats_either_bound(seed):
    trace = naive.random_trace(seed)
    link = Link(15.0, 25.0)
    for sample in range(20):
        timing = simulate(trace, [Swap(*swap) for swap in naive.random_swaps(trace, 100 * seed + sample)], link)
        bounds = cut_bounds(trace, timing.peak_bytes, link)
        assert max(bounds.single, bounds.double) <= timing.step_seconds * (1 + 1e-12)


def test_two_cuts_see_what_one_does_not():
    nodes = tuple(Node(f"n{k}", 1.0, k > 3) for k in range(8))
    early, late = SavedTensor(0, 10, 0, 0, 0, 7, 7), SavedTensor(1, 10, 2, 2, 2, 5, 5)
    trace = Trace(nodes, (0, 10, 0, 0, 0, 0, 10, 0), (early, late))
    bounds = cut_bounds(trace, 10, Link(2.0, 2.0))
    assert bounds.double > bounds.single


def test_the_bound_is_infinite_below_the_least_limit():
    trace = naive.random_trace(1)
    least = least_feasible_limit(trace)
    assert cut_bound(trace, least - 1, Link(1.0, 1.0)) == math.inf
    assert cut_bound(trace, least, Link(1.0, 1.0)) < math.inf


@given(naive.traces())
def test_the_least_limit_is_that_of_the_definition(trace):
    assert least_feasible_limit(trace) == naive.least_limit(trace)


def test_an_infeasible_limit_says_what_would_do_and_why():
    nodes = (Node("embed", 1.0, False), Node("head", 1.0, False), Node("head.grad", 1.0, True))
    trace = Trace(nodes, (5, 100, 5), (SavedTensor(3, 40, 0, 0, 1, 2, 2), SavedTensor(4, 7, 1, 1, 1, 2, 2)))
    check_limit(trace, 147)
    with pytest.raises(InfeasibleLimitError, match=r'keeps 146 B; .* is 147 B. Write memory_limit="147B"') as caught:
        check_limit(trace, 146)
    error = caught.value
    assert isinstance(error, ValueError)
    assert not isinstance(error, MemoryError), "a plan that does not exist is no lack of memory"
    assert (error.limit_bytes, error.least_limit_bytes, error.least_bytes) == (146, 147, 147)
    assert [reason.bytes for reason in error.reasons] == [100, 40, 7]
    assert "node 1 (head)" in error.reasons[0].text
    assert "tensor 3 of embed" in error.reasons[1].text
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.least_limit_bytes, copy.reasons, str(copy)) == (147, error.reasons, str(error))


def test_an_empty_trace_needs_nothing():
    trace = Trace((), (), ())
    assert least_feasible_limit(trace) == 0
    assert cut_bound(trace, 1, Link(1.0, 1.0)) == 0.0
