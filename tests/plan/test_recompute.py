"""A step with recomputed tensors: its timing and residency against the same read literally, to the bit."""

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan import (
    Link,
    Recomputation,
    Swap,
    least_feasible_limit,
    make_plan,
    recomputations,
    recomputed,
    resident_bytes,
    simulate,
)
from offload.plan.drop_set import DropSet
from offload.plan.trace import Node, Recompute, SavedTensor, Trace


def some_of(trace, seed, share=0.5):
    rng = np.random.default_rng(seed)
    return {x.id for x in trace.tensors if x.recompute and rng.random() < share}


def check(trace, dropped, link, seed):
    step = recomputed(trace, dropped)
    uses = naive.first_uses(trace, dropped)
    stay = {x.id for x in trace.tensors if uses[x.id] <= x.last_forward}  # sources that are used before they could go
    swaps = [swap for swap in naive.random_swaps(step, seed) if swap[0] not in stay]
    timing = simulate(step, [Swap(*swap) for swap in swaps], link)
    bandwidths = (link.out_bandwidth, link.in_bandwidth, link.latency)
    ready, start, finish, outs, ins = naive.timing(trace, swaps, *bandwidths, dropped=dropped)
    assert (list(timing.ready), list(timing.start), list(timing.finish)) == (ready, start, finish)
    assert {copy.id: (copy.start, copy.end) for copy in timing.copy_outs} == outs
    assert {copy.id: (copy.start, copy.end) for copy in timing.copy_ins} == ins
    assert list(timing.resident) == naive.joint_resident(trace, swaps, dropped)
    plan = make_plan(trace, link, [Swap(*swap) for swap in swaps], recomputes=dropped)
    assert (plan.step_seconds, plan.peak_bytes) == (timing.step_seconds, timing.peak_bytes)
    assert plan.timing == timing
    assert dict(plan.recomputes) == {i: use for i, use in uses.items() if i in dropped}


@pytest.mark.parametrize("seed", range(60))
def test_timing_and_residency_are_those_of_the_definition(seed):
    trace = naive.with_recipes(naive.random_trace(seed), seed)
    check(trace, some_of(trace, seed, (0.2, 0.5, 1.0)[seed % 3]), Link(30.0 + seed, 50.0, 0.1 * (seed % 3)), seed)


@given(naive.traces(), st.integers(0, 1000))
def test_they_are_so_on_ties_and_zeros(trace, seed):
    trace = naive.with_recipes(trace, seed)
    check(trace, some_of(trace, seed), Link(2.0, 3.0), seed)


def test_a_tensor_is_dropped_only_where_a_plan_keeps_the_limit_then():
    agreed = []
    for seed in range(40):
        trace = naive.with_recipes(naive.random_trace(seed), seed)
        limit = int(least_feasible_limit(trace) * (1 + 0.1 * (seed % 4)))
        drops = DropSet(trace, limit)
        for x in trace.tensors:
            if x.recompute:
                fits = least_feasible_limit(recomputed(trace, drops.ids | {x.id})) <= limit
                added = drops.add(x.id)
                assert (x.id in drops.ids) == added
                assert fits or not added
                agreed.append(added == fits)
    assert sum(agreed) >= 0.98 * len(agreed)


def chain():
    """Return three tensors, each made from the one before, and needed in the reverse order."""
    nodes = tuple(Node(f"n{k}", 1.0, k > 3) for k in range(8))
    tensors = (
        SavedTensor(0, 4, 0, 0, 1, 7, 7),
        SavedTensor(1, 10, 1, 1, 2, 6, 6, Recompute(0.5, (0,), workspace_bytes=3)),
        SavedTensor(2, 20, 2, 2, 2, 5, 5, Recompute(0.25, (1,))),
    )
    return Trace(nodes, (0,) * 8, tensors)


def test_a_source_has_to_be_back_when_it_is_needed():
    step = recomputed(chain(), [1])
    assert [x.id for x in step.tensors] == [0, 2]
    assert step.tensors[0].first_backward == 6
    assert [node.seconds for node in step.nodes] == [1.0] * 6 + [1.5, 1.0]
    assert step.base_bytes == (0, 10, 10, 0, 0, 0, 13, 0)
    assert all(x.recompute is None for x in step.tensors)


def test_a_dropped_source_is_made_first_and_waits_for_its_own_use():
    step = recomputed(chain(), [2, 1])
    assert recomputations(chain(), [2, 1]) == (Recomputation(1, 5), Recomputation(2, 5))
    assert [x.first_backward for x in step.tensors] == [5]
    assert step.nodes[5].seconds == 1.75
    assert step.base_bytes == (0, 10, 30, 0, 0, 33, 10, 0)


def test_a_source_stays_until_what_is_made_from_it_is_made():
    nodes = tuple(Node(f"n{k}", 1.0, k > 2) for k in range(6))
    tensors = (SavedTensor(0, 4, 0, 0, 0, 3, 3), SavedTensor(1, 10, 1, 1, 1, 5, 5, Recompute(0.5, (0,))))
    step = recomputed(Trace(nodes, (0,) * 6, tensors), [1])
    assert (step.tensors[0].first_backward, step.tensors[0].last_use) == (3, 5)
    assert resident_bytes(step, ()) == (4, 14, 4, 4, 4, 14)


@pytest.mark.parametrize(("ids", "message"), [([9], "no tensor has the id 9"), ([0], "tensor 0 has no recipe")])
def test_what_cannot_be_recomputed_is_refused(ids, message):
    with pytest.raises(ValueError, match=f"recomputes: {message}"):
        recomputed(chain(), ids)
    with pytest.raises(ValueError, match=f"recomputes: {message}"):
        make_plan(chain(), Link(1.0, 1.0), (), recomputes=ids)


def test_a_recomputed_tensor_does_not_swap():
    with pytest.raises(ValueError, match="swaps: no tensor has the id 1"):
        make_plan(chain(), Link(1.0, 1.0), [Swap(1, 3, 5)], recomputes=[1])


def test_a_plan_tells_what_is_recomputed():
    plan = make_plan(chain(), Link(8.0, 8.0), [Swap(0, 3, 4)], recomputes=[1, 2])
    assert plan.to_dict()["recomputes"] == [{"id": 1, "at": 5}, {"id": 2, "at": 5}]
    assert (plan.compute_seconds, plan.step_seconds, plan.recompute_seconds) == (8.0, 8.75, 0.75)
    words = plan.explain()
    assert "compute 8.000 s, recomputing 750 ms, waiting 0.000 s; no plan within" in words
    assert "1 of 3 tensors swap, up to 4 B; 2 are recomputed, 30 B" in words
    assert "n1 (tensor 1), 10 B: dropped after node 2 (n2), recomputed at node 5 (n5) in 500 ms from 0" in words
