"""The proof of how good a plan is: against the optimum of small steps, and where one large tensor decides."""

import sys

import naive
import pytest

from offload.plan import (
    InfeasibleLimitError,
    Link,
    Swap,
    cut_bounds,
    fastest_plan,
    fastest_swaps,
    least_feasible_limit,
    prove,
    resident_bytes,
    simulate,
    unswapped_bytes,
)
from offload.plan.trace import Node, SavedTensor, Trace

pytest.importorskip("scipy", reason="the exact planner needs scipy")


def tight_limit(trace, part):
    least = least_feasible_limit(trace)
    return int(least + part * (max(unswapped_bytes(trace)) - least))


def everything(trace):
    return [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]


def large_tensor_trace():
    """Return a step in which 2 of 14 bytes must be away, 12 of them in one tensor that is packed late."""
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    tensors = (SavedTensor(0, 1, 0, 0, 0, 5, 5), SavedTensor(1, 12, 1, 1, 1, 4, 4))
    return Trace(nodes, (0, 0, 1, 1, 0, 0), tensors)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_below_it_and_it_is_not_below_two_cuts(seed):
    trace = naive.random_trace(seed, 14, 9)
    link, limit = Link(40.0, 30.0, 0.05 * (seed % 2)), tight_limit(trace, (0.3, 0.1, 0.0)[seed % 3])
    plan = fastest_plan(trace, link, limit)
    exact = fastest_swaps(trace, link, limit, plan.swaps)
    proof = prove(trace, link, limit, plan.swaps, gap=0.0, seconds_max=20.0)
    assert exact.optimal
    assert proof.bound_seconds <= exact.step_seconds * (1 + 1e-5)
    assert proof.bound_seconds >= cut_bounds(trace, limit, link).double * (1 - 1e-9)
    assert proof.step_seconds <= plan.step_seconds


def test_it_counts_that_a_tensor_moves_whole():
    trace, link = large_tensor_trace(), Link(2.0, 2.0)
    plan = fastest_plan(trace, link, 12)
    proof = prove(trace, link, 12, plan.swaps)
    assert cut_bounds(trace, 12, link).double < 10
    assert proof.gap <= 0.001
    assert proof.bound_seconds == pytest.approx(plan.step_seconds, rel=0.001)


@pytest.mark.long
def test_a_poor_plan_is_replaced_by_a_better_one_that_keeps_the_limit():
    trace = naive.random_trace(5, 40, 25)
    link, limit = Link(30.0, 30.0), tight_limit(trace, 0.3)
    poor = simulate(trace, everything(trace), link).step_seconds
    proof = prove(trace, link, limit, everything(trace), seconds_max=20.0)
    assert proof.step_seconds < poor
    assert proof.step_seconds == simulate(trace, proof.swaps, link).step_seconds
    assert max(resident_bytes(trace, proof.swaps)) <= limit


def test_a_step_without_stalls_needs_no_solver(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    trace = naive.random_trace(0)
    proof = prove(trace, Link(1.0, 1.0), max(unswapped_bytes(trace)), ())
    assert (proof.swaps, proof.gap) == ((), 0.0)
    with pytest.raises(ImportError, match=r'in the checkout of offload, type: pip install "\.\[cli\]"'):
        prove(trace, Link(1.0, 1.0), least_feasible_limit(trace), everything(trace))


def test_no_time_leaves_the_bound_of_two_cuts():
    trace, link = naive.random_trace(1), Link(20.0, 20.0)
    limit = least_feasible_limit(trace)
    proof = prove(trace, link, limit, everything(trace), seconds_max=0.0)
    assert proof.bound_seconds == cut_bounds(trace, limit, link).double
    assert proof.gap > 0


def test_a_plan_beyond_the_limit_is_refused():
    nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    trace = Trace(nodes, (0, 0, 6, 0), (SavedTensor(7, 10, 0, 0, 0, 3, 3),))
    with pytest.raises(ValueError, match="the given plan needs 16 bytes, the limit is 10"):
        prove(trace, Link(2.0, 2.0), 10, [])


def test_an_infeasible_limit_is_refused():
    trace = naive.random_trace(0)
    with pytest.raises(InfeasibleLimitError):
        prove(trace, Link(1.0, 1.0), least_feasible_limit(trace) - 1, everything(trace))
