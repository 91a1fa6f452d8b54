"""The bound of plans that swap and recompute: against its definition, and against every plan of small steps."""

import itertools
import math
import random

import naive
import pytest
from some_rows import one_in
from test_exact import every_plan

from offload.plan import (
    Link,
    cut_bound,
    fastest_plan,
    joint_bound,
    least_feasible_limit,
    recomputed,
    resident_bytes,
    simulate,
    unswapped_bytes,
)
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

TOLERANCE = 1.1e-5  # nodes that could raise the bound by less are passed over
INSTANCES = 120


def instance(seed, tensors_max=5, nodes_max=7):
    """Return a small step with recipes, a link and a limit, or None where the limit could not matter."""
    rng = random.Random(seed)
    forward = rng.randint(4, nodes_max)
    count = 2 * forward
    nodes = tuple(Node(str(k), rng.choice([0.2, 0.5, 1.0, 2.0]), k >= forward) for k in range(count))
    tensors = []
    for i in range(rng.randint(2, tensors_max)):
        packed = rng.randrange(forward - 1)
        last_forward = rng.randint(packed, min(forward - 1, packed + 1))
        first = rng.randint(max(forward, last_forward + 1), count - 1)
        before = [x.id for x in tensors if x.produced < packed and rng.random() < 0.5]
        recipe = Recompute(rng.choice([0.1, 0.4, 1.5]), tuple(before), rng.choice([0, 0, 1]))
        last = min(count - 1, first + rng.randint(0, 1))
        recompute = recipe if rng.random() < 0.8 else None
        tensors.append(SavedTensor(i, rng.randint(1, 9), packed, packed, last_forward, first, last, recompute))
    trace = Trace(nodes, tuple(rng.randint(0, 2) for _ in nodes), tuple(tensors))
    least, most = least_feasible_limit(trace), max(unswapped_bytes(trace))
    if most <= least:
        return None
    link = Link(rng.choice([1.0, 3.0, 8.0]), rng.choice([1.0, 3.0, 8.0]))
    return trace, link, rng.randint(max(1, least), most - 1)


def instances(count, **sizes):
    found = (instance(seed, **sizes) for seed in itertools.count())
    return list(itertools.islice((each for each in found if each is not None), count))


def drop_sets(trace):
    ids = [x.id for x in trace.tensors if x.recompute]
    return itertools.chain.from_iterable(itertools.combinations(ids, count) for count in range(len(ids) + 1))


@pytest.mark.parametrize("part", one_in(2, range(8)))
def test_no_set_of_drops_with_any_set_of_swaps_beats_it_and_the_planner_finds_the_best(part):
    for trace, link, limit in instances(INSTANCES)[part::8]:
        best = math.inf
        for dropped in drop_sets(trace):
            step = recomputed(trace, dropped)
            if least_feasible_limit(step) <= limit:
                best = min(best, fastest_plan(step, link, limit).step_seconds)
        assert joint_bound(trace, limit, link) <= best * (1 + 1e-12)
        plan = fastest_plan(trace, link, limit)
        assert plan.step_seconds <= best * (1 + 1e-12)
        assert plan.peak_bytes <= limit


def test_no_plan_beats_it():
    for trace, link, limit in instances(30, tensors_max=2, nodes_max=5):
        best = math.inf
        for dropped in drop_sets(trace):
            step = recomputed(trace, dropped)
            for swaps in every_plan(step):
                if max(resident_bytes(step, swaps)) <= limit:
                    best = min(best, simulate(step, swaps, link).step_seconds)
        assert joint_bound(trace, limit, link) <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_that_of_the_definition(seed):
    trace = naive.with_recipes(naive.random_trace(seed, 30, 15), seed)
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    for bandwidths in ((20.0, 33.0), (500.0, 200.0), (math.inf, 3.0)):
        for part in (0, 1, 3, 6):
            limit = least + (peak - least) * part // 8
            low, high = naive.joint_bounds(trace, limit, *bandwidths)
            bound = joint_bound(trace, limit, Link(*bandwidths))
            assert low * (1 - TOLERANCE) <= bound <= high * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_without_recipes_it_is_the_cut_bound(seed):
    trace, link = naive.random_trace(seed), Link(20.0, 33.0)
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    for part in range(9):
        limit = least + (peak - least) * part // 8
        assert joint_bound(trace, limit, link) == pytest.approx(cut_bound(trace, limit, link), rel=TOLERANCE)
    assert joint_bound(trace, least - 1, link) == math.inf


def test_an_empty_trace_takes_no_time():
    assert joint_bound(Trace((), (), ()), 1, Link(1.0, 1.0)) == 0.0


def test_what_is_shared_counts_once():
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    recipe = Recompute(4.0, (), least_seconds=2.0)
    tensors = tuple(SavedTensor(i, 10, 0, 0, 0, 5, 5, recipe) for i in range(2))
    trace = Trace(nodes, (0, 0, 0, 20, 0, 0), tensors)
    assert joint_bound(trace, 20, Link(1e-9, 1e-9)) == pytest.approx(6.0 + 4.0)
