"""The swaps of a reference step: within the plan's memory, in few groups, none where there is room."""

import naive
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan import Link, Swap, fastest_plan, least_feasible_limit, make_plan, serial_swaps, unswapped_bytes
from offload.plan.trace import Node, SavedTensor, Trace

LINK = Link(5.0, 5.0)


def at_once(trace, ids):
    """Peak of a step that waits for each copy-out at once, and copies in only when backward needs the tensor."""
    swaps = [(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors if x.id in ids]
    return max(naive.resident(trace, swaps), default=0)


@given(naive.traces(), st.floats(0, 1))
@settings(deadline=None)
def test_memory_is_the_plans(trace, part):
    least = max(1, least_feasible_limit(trace))
    plan = fastest_plan(trace, LINK, least + int(part * max(0, max(unswapped_bytes(trace), default=0) - least)))
    swaps = serial_swaps(plan)
    moved = {swap.id for swap in plan.swaps}
    assert {swap.id for swap in swaps} <= moved
    make_plan(trace, LINK, swaps)  # raises where a release or a prefetch is at an impossible node
    assert max(naive.resident(trace, swaps), default=0) <= max(plan.peak_bytes, at_once(trace, moved))


def stack(count, nbytes=10):
    """`count` layers, each of which saves one tensor."""
    nodes = [Node(str(number), 1.0, number >= count) for number in range(2 * count)]
    tensors = [SavedTensor(i, nbytes, i, i, i, 2 * count - 1 - i, 2 * count - 1 - i) for i in range(count)]
    return Trace(nodes=nodes, tensors=tensors, base_bytes=[0] * len(nodes))


def test_copies_are_few_and_together():
    trace = stack(12)
    plan = fastest_plan(trace, LINK, 40)
    swaps = serial_swaps(plan)
    releases = {swap.release for swap in swaps}
    prefetches = {swap.prefetch for swap in swaps}
    assert len(swaps) >= 8
    assert len(releases) <= 4
    assert len(prefetches) <= 4


def test_what_fits_stays():
    trace = stack(4)
    plan = make_plan(trace, LINK, (Swap(0, 5, 7),))
    assert plan.peak_bytes == max(unswapped_bytes(trace))  # it swaps without need
    assert serial_swaps(plan) == ()


def test_ten_thousand_tensors():
    trace = stack(10_000)
    plan = make_plan(trace, LINK, tuple(Swap(i, i + 1, 2 * 10_000 - 1 - i) for i in range(9_000)))
    assert len(serial_swaps(plan)) == 9_000
