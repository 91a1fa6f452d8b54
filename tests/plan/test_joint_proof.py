"""The proof of how good a joint plan is: against every set of drops of small steps."""

import math
import random
import sys
from dataclasses import replace

import pytest
from test_choices import chain_of
from test_exact import every_plan
from test_joint_bound import drop_sets, instances

from offload.plan import (
    Link,
    Swap,
    fastest_plan,
    joint_bound,
    least_feasible_limit,
    make_plan,
    prove_joint,
    recomputed,
    resident_bytes,
    simulate,
    unswapped_bytes,
)
from offload.plan.certify import joint_proof
from offload.plan.certify.exact_placement import ExactPlacement
from offload.plan.trace import Node, Recompute, SavedTensor, Trace


def slowest(trace, link, limit):
    """Return the plan that swaps every tensor for as long as is allowed: no bound is above its step time."""
    swaps = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]
    return make_plan(trace, link, swaps, limit, recomputes=())


def test_no_plan_is_below_it_and_it_is_not_below_the_joint_bound():
    for trace, link, limit in instances(24):
        best = math.inf
        for dropped in drop_sets(trace):
            step = recomputed(trace, dropped)
            if least_feasible_limit(step) <= limit:
                best = min(best, fastest_plan(step, link, limit).step_seconds)
        for plan in (fastest_plan(trace, link, limit), slowest(trace, link, limit)):
            proof = prove_joint(plan, gap=0.0, seconds_max=20.0)
            assert joint_bound(trace, limit, link) * (1 - 1e-9) <= proof.bound_seconds <= best * (1 + 1e-5)
            assert proof.plan.step_seconds <= plan.step_seconds


def chained(seed):
    """Return a step of four tensors, each recomputed from the one before, with base bytes, a link and a limit."""
    rng = random.Random(seed)
    trace = chain_of([rng.randint(1, 9) for _ in range(4)], rng.choice([0.2, 0.5, 2.0]))
    nodes = tuple(replace(node, seconds=rng.choice([0.2, 0.5, 1.0])) for node in trace.nodes)
    trace = replace(trace, nodes=nodes, base_bytes=tuple(rng.randint(0, 3) for _ in nodes))
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    link = Link(rng.choice([1.0, 3.0, 8.0]), rng.choice([1.0, 3.0, 8.0]))
    return trace, link, min(peak - 1, least + rng.randint(0, (peak - least) // 2))


def fastest(trace, link, limit):
    """Return the shortest step time of all plans within the limit."""
    best = math.inf
    for dropped in drop_sets(trace):
        step = recomputed(trace, dropped)
        for swaps in every_plan(step):
            if max(resident_bytes(step, swaps)) <= limit:
                best = min(best, simulate(step, swaps, link).step_seconds)
    return best


@pytest.mark.parametrize("seed", range(16))
def test_it_finds_the_fastest_plan_of_a_chain(seed):
    trace, link, limit = chained(seed)
    best = fastest(trace, link, limit)
    proof = prove_joint(slowest(trace, link, limit), gap=0.0, seconds_max=20.0)
    assert proof.bound_seconds == pytest.approx(best, rel=1e-9)
    assert proof.plan.step_seconds == pytest.approx(best, rel=1e-9)
    assert proof.plan.peak_bytes <= limit


def test_where_it_does_not_find_the_fastest_plan_of_some_choices_their_bound_is_valid(monkeypatch):
    monkeypatch.setattr(joint_proof, "exact_placement", lambda *_: ExactPlacement(None, complete=False))
    monkeypatch.setattr(joint_proof, "_placed", lambda *_: None)
    for seed in range(4):
        trace, link, limit = chained(seed)
        poor = slowest(trace, link, limit)
        proof = prove_joint(poor, gap=0.0, seconds_max=20.0)
        assert proof.bound_seconds <= fastest(trace, link, limit) * (1 + 1e-12)
        assert proof.bound_seconds < poor.step_seconds == proof.plan.step_seconds


def test_a_run_and_the_tensor_before_it_come_back_at_its_first_use_and_not_before():
    nodes = tuple(Node(str(k), 1.0, k > 3) for k in range(8))
    tensors = (SavedTensor(0, 5, 0, 0, 0, 7, 7), SavedTensor(1, 5, 1, 1, 1, 6, 6, Recompute(0.2, (0,))))
    trace, link = Trace(nodes, (0, 0, 0, 0, 0, 10, 0, 0), tensors), Link(100.0, 1.0)
    assert fastest_plan(trace, link, 10).step_seconds == pytest.approx(13.2)
    assert 12.0 - 1e-5 <= prove_joint(slowest(trace, link, 10)).bound_seconds <= 13.2 + 1e-5


def test_a_tensor_may_be_recomputed_earlier_for_one_outside_of_its_chain():
    nodes = tuple(Node(str(k), 1.0, k > 4) for k in range(10))
    tensors = (
        SavedTensor(0, 5, 0, 0, 0, 8, 8),
        SavedTensor(1, 5, 1, 1, 1, 8, 8, Recompute(2.0, ())),
        SavedTensor(2, 1, 2, 2, 2, 9, 9, Recompute(9.0, (1,))),
        SavedTensor(3, 5, 3, 3, 3, 6, 6, Recompute(0.1, (1,))),
    )
    trace, link = Trace(nodes, (0, 0, 0, 0, 0, 15, 0, 0, 0, 0), tensors), Link(100.0, 1.0)
    assert fastest_plan(trace, link, 16).step_seconds == pytest.approx(13.0)
    assert prove_joint(slowest(trace, link, 16)).bound_seconds <= 13.0 * (1 + 1e-5)


def test_it_ends_at_the_gap_that_was_asked_for():
    plan = slowest(whole(), Link(0.1, 0.1), 13)
    assert plan.step_seconds > 100
    bounds = []
    for gap in (20.0, 3.0, 0.5, 0.0):
        proof = prove_joint(plan, gap=gap)
        assert proof.gap <= gap
        bounds.append(proof.bound_seconds)
    assert bounds == sorted(bounds)
    assert joint_bound(whole(), 13, plan.link) <= bounds[0] < bounds[-1] == 9.0


def whole():
    """Return a step in which 1 of 14 bytes must be away, 12 of them in one tensor that takes long to make."""
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    large = SavedTensor(1, 12, 1, 1, 1, 4, 4, Recompute(3.0, ()))
    return Trace(nodes, (0, 0, 1, 1, 0, 0), (SavedTensor(0, 1, 0, 0, 0, 5, 5), large))


def test_it_counts_that_a_tensor_is_dropped_whole():
    plan = fastest_plan(whole(), Link(0.1, 0.1), 13)
    proof = prove_joint(plan)
    assert plan.recomputes
    assert joint_bound(whole(), 13, plan.link) < 7.5
    assert proof.bound_seconds == pytest.approx(plan.step_seconds, rel=0.001) == 9.0


def test_a_poor_plan_is_replaced_by_a_better_one_that_keeps_the_limit():
    trace, link = whole(), Link(0.1, 0.1)
    poor = make_plan(trace, link, fastest_plan(trace, link, 13, recompute=False).swaps, 13, recomputes=())
    proof = prove_joint(poor)
    assert proof.plan.step_seconds < poor.step_seconds
    step = proof.plan.recomputed_trace
    assert proof.plan.step_seconds == simulate(step, proof.plan.swaps, link).step_seconds
    assert max(resident_bytes(step, proof.plan.swaps)) <= 13


def test_a_step_without_waits_needs_no_solver(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    plan = fastest_plan(whole(), Link(0.1, 0.1), max(unswapped_bytes(whole())))
    assert prove_joint(plan).gap == 0.0


def test_a_plan_beyond_its_limit_is_refused():
    with pytest.raises(ValueError, match="the given plan needs 14 bytes, the limit is 12"):
        prove_joint(make_plan(whole(), Link(1.0, 1.0), (), 12, recomputes=()))
