"""The fastest releases and prefetches of given swaps: against all of them on small steps."""

import itertools
import math
import random

import pytest
from some_rows import one_in
from test_joint_bound import drop_sets, instances

from offload.plan import Link, Swap, recomputed, resident_bytes, simulate
from offload.plan.certify.exact_placement import ExactPlacement, exact_placement
from offload.plan.placement import Step
from offload.plan.trace import Node, SavedTensor, Trace


def every_placement(trace, ids):
    """Yield the swaps of these tensors with all releases and prefetches."""
    spans = [
        [
            Swap(x.id, *nodes)
            for nodes in itertools.combinations_with_replacement(range(x.last_forward + 1, x.first_backward + 1), 2)
        ]
        for x in trace.tensors
        if x.id in ids
    ]
    return itertools.product(*spans)


def fastest(trace, link, limit, ids):
    """Return the shortest step time of all releases and prefetches of these tensors within the limit."""
    fitting = (swaps for swaps in every_placement(trace, ids) if max(resident_bytes(trace, swaps)) <= limit)
    return min((simulate(trace, swaps, link).step_seconds for swaps in fitting), default=math.inf)


def placed(trace, link, limit, ids, cutoff=math.inf, **options):
    """Return what the search finds for these tensors."""
    step = Step(trace, link)
    return exact_placement(step, [i for i, each in enumerate(step.ids) if each in ids], limit, cutoff, **options)


def check(trace, link, limit, ids):
    """Compare the search with all placements, and below its own result; return whether there is a placement."""
    best = fastest(trace, link, limit, ids)
    found = placed(trace, link, limit, ids)
    assert found.complete
    if best == math.inf:
        assert found.swaps is None
        return False
    assert {swap.id for swap in found.swaps} == set(ids)
    assert max(resident_bytes(trace, found.swaps)) <= limit
    assert simulate(trace, found.swaps, link).step_seconds == pytest.approx(best, rel=1e-12)
    assert placed(trace, link, limit, ids, best * (1 - 1e-9)).swaps is None
    assert placed(trace, link, limit, ids, best * (1 + 1e-9)).swaps is not None
    return True


def subsets(ids):
    return itertools.chain.from_iterable(itertools.combinations(ids, count) for count in range(len(ids) + 1))


@pytest.mark.parametrize("part", one_in(2, range(8)))
def test_no_placement_of_a_step_with_recomputed_tensors_is_faster(part):
    count = 0
    for trace, link, limit in instances(160, tensors_max=3, nodes_max=5)[part::8]:
        for dropped in drop_sets(trace):
            step = recomputed(trace, dropped)
            for ids in subsets([x.id for x in step.tensors]):
                count += check(step, link, limit, ids)
    assert count > 20


def mixed(seed):
    """Return a step of three tensors that are packed and used in any order, a link, and a limit."""
    rng = random.Random(seed)
    nodes = tuple(Node(str(k), rng.choice([0.0, 0.2, 0.5, 1.0]), k > 0) for k in range(7))
    tensors = []
    for i in range(3):
        packed = rng.randint(0, 4)
        last_forward = rng.randint(packed, min(packed + 1, 5))
        use = rng.randint(last_forward + 1, 6)
        tensors.append(SavedTensor(i, rng.randint(1, 9), packed, packed, last_forward, use, use))
    trace = Trace(nodes, tuple(rng.randint(0, 9) for _ in nodes), tuple(tensors))
    longest = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in tensors]
    least, peak = max(resident_bytes(trace, longest)), max(resident_bytes(trace, ()))
    link = Link(rng.choice([1.0, 3.0, 8.0]), rng.choice([1.0, 3.0, 8.0]), rng.choice([0.0, 0.3]))
    return trace, link, least + rng.randint(0, max(0, peak - least))


@pytest.mark.parametrize("part", range(8))
def test_no_placement_of_tensors_packed_and_used_in_any_order_is_faster(part):
    for seed in range(part, 480, 8):
        assert check(*mixed(seed), range(3))


def test_it_gives_up_at_a_number_of_labels():
    trace, link, limit = mixed(50)
    assert placed(trace, link, limit, range(3)).swaps is not None
    assert placed(trace, link, limit, range(3), labels_max=3) == ExactPlacement(None, complete=False)


def test_a_step_beyond_the_limit_has_no_placement():
    nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    trace = Trace(nodes, (0, 7, 0, 0), (SavedTensor(0, 5, 0, 0, 0, 3, 3), SavedTensor(1, 1, 2, 2, 2, 3, 3)))
    assert placed(trace, Link(1.0, 1.0), 7, [0]) == ExactPlacement((Swap(0, 1, 2),), complete=True)
    assert placed(trace, Link(1.0, 1.0), 6, [0]) == ExactPlacement(None, complete=True)
