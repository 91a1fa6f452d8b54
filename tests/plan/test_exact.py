"""The exact planner: against every plan of tiny instances, and as the judge of the search."""

import itertools
import sys

import naive
import numpy as np
import pytest

from offload.plan import (
    InfeasibleLimitError,
    Link,
    Swap,
    fastest_plan,
    fastest_swaps,
    least_feasible_limit,
    resident_bytes,
    simulate,
    unswapped_bytes,
)
from offload.plan.trace import Node, SavedTensor, Trace

pytest.importorskip("scipy", reason="the exact planner needs scipy")


def middle_limit(trace, part=0.2):
    least = least_feasible_limit(trace)
    return int(least + part * (max(unswapped_bytes(trace)) - least))


def mirrored_trace(seed, tensor_count):
    """Return a step whose tensors return in about the reverse order of leaving."""
    rng = np.random.default_rng(seed)
    forward = 6
    nodes = tuple(Node(f"n{k}", float(rng.uniform(0.1, 2)), k >= forward) for k in range(2 * forward))
    tensors = []
    for i in range(tensor_count):
        packed = int(rng.integers(0, forward - 1))
        back = min(2 * forward - 1, max(forward, 2 * forward - 1 - packed + int(rng.integers(-1, 2))))
        last_forward = min(forward - 1, packed + int(rng.integers(0, 2)))
        tensors.append(SavedTensor(i, int(rng.integers(5, 60)), packed, packed, last_forward, back, back))
    return Trace(nodes, tuple(rng.integers(0, 30, 2 * forward).tolist()), tuple(tensors))


def every_plan(trace):
    choices = []
    for x in trace.tensors:
        spans = itertools.combinations(range(x.last_forward + 1, x.first_backward + 1), 2)
        choices.append([None, *(Swap(x.id, release, prefetch) for release, prefetch in spans)])
    return ([swap for swap in plan if swap is not None] for plan in itertools.product(*choices))


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_of_all_plans(seed):
    trace = mirrored_trace(seed, 2)
    link, limit = Link(20.0, 25.0, 0.05), middle_limit(trace)
    best = min(
        simulate(trace, plan, link).step_seconds
        for plan in every_plan(trace)
        if max(resident_bytes(trace, plan)) <= limit
    )
    slowest = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]
    exact = fastest_swaps(trace, link, limit, slowest)
    assert exact.optimal
    assert exact.step_seconds == pytest.approx(best, rel=1e-5)
    assert max(resident_bytes(trace, exact.swaps)) <= limit


def test_the_search_is_close_to_the_optimum():
    above = []
    for seed in range(12):
        trace = mirrored_trace(seed, 4 + seed % 6)
        link, limit = Link(40.0, 40.0), middle_limit(trace, (0.5, 0.2, 0.05)[seed % 3])
        plan = fastest_plan(trace, link, limit)
        exact = fastest_swaps(trace, link, limit, plan.swaps, seconds_max=20.0)
        assert exact.step_seconds <= plan.step_seconds
        above.append(plan.step_seconds / exact.step_seconds - 1)
    assert max(above) <= 0.05, above
    assert sum(above) / len(above) <= 0.005, above


def test_a_step_without_stalls_needs_no_proof():
    trace = mirrored_trace(0, 3)
    exact = fastest_swaps(trace, Link(1.0, 1.0), max(unswapped_bytes(trace)), ())
    assert (exact.swaps, exact.optimal) == ((), True)


def test_an_infeasible_limit_is_refused():
    trace = mirrored_trace(0, 3)
    with pytest.raises(InfeasibleLimitError):
        fastest_swaps(trace, Link(1.0, 1.0), least_feasible_limit(trace) - 1, ())


def test_a_large_instance_is_refused():
    trace = naive.random_trace(0, 1500, 60)
    link = Link(0.5, 0.5)
    slowest = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]
    with pytest.raises(ValueError, match="binary variables"):
        fastest_swaps(trace, link, least_feasible_limit(trace), slowest)


def test_without_scipy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    trace = mirrored_trace(0, 3)
    slowest = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]
    with pytest.raises(ImportError, match=r'in the checkout of offload, type: pip install "\.\[cli\]"'):
        fastest_swaps(trace, Link(1.0, 1.0), least_feasible_limit(trace), slowest)
