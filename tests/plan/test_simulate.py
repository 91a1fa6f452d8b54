"""The timing of a plan against the same read literally, to the bit."""

import naive
import pytest

from offload.plan import Link, Swap, resident_bytes, simulate, unswapped_bytes
from offload.plan.trace import Node, SavedTensor, Trace


@pytest.mark.parametrize("seed", range(60))
def test_timing_and_residency_are_those_of_the_definition(seed):
    trace = naive.random_trace(seed)
    swaps = naive.random_swaps(trace, seed)
    link = Link(30.0 + seed, 50.0, 0.1 * (seed % 3))
    result = simulate(trace, [Swap(*swap) for swap in swaps], link)
    ready, start, finish, outs, ins = naive.timing(trace, swaps, link.out_bandwidth, link.in_bandwidth, link.latency)
    assert list(result.ready) == ready
    assert list(result.start) == start
    assert list(result.finish) == finish
    assert {copy.id: (copy.start, copy.end) for copy in result.copy_outs} == outs
    assert {copy.id: (copy.start, copy.end) for copy in result.copy_ins} == ins
    assert list(result.resident) == naive.resident(trace, swaps)
    assert result.peak_bytes == max(naive.resident(trace, swaps))
    assert result.step_seconds == finish[-1]


def test_without_swaps_the_step_is_the_running_sum():
    trace = naive.random_trace(3)
    result = simulate(trace, (), Link(1.0, 1.0))
    total = 0.0
    for node in trace.nodes:
        total += node.seconds
    assert result.step_seconds == total
    assert result.resident == unswapped_bytes(trace) == resident_bytes(trace, ())


def test_an_empty_trace_takes_no_time():
    result = simulate(Trace((), (), ()), (), Link(1.0, 1.0))
    assert (result.step_seconds, result.peak_bytes, result.ready) == (0.0, 0, ())


def test_an_infinite_link_hides_everything():
    trace = naive.random_trace(5)
    swaps = [Swap(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]
    fast = float("inf")
    assert simulate(trace, swaps, Link(fast, fast)).step_seconds == simulate(trace, (), Link(1.0, 1.0)).step_seconds


def four_nodes():
    nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    return Trace(nodes, (0, 0, 0, 0), (SavedTensor(7, 10, 0, 0, 0, 3, 3),))


@pytest.mark.parametrize(
    ("swaps", "message"),
    [
        ([Swap(8, 1, 3)], "no tensor has the id 8"),
        ([Swap(7, 1, 3), Swap(7, 2, 3)], "tensor 7 is swapped twice"),
        ([Swap(7, 0, 3)], "last_forward 0 < release"),
        ([Swap(7, 3, 2)], "release 3 and prefetch 2"),
        ([Swap(7, 1, 4)], "first_backward 3"),
    ],
)
def test_a_malformed_plan_is_refused(swaps, message):
    with pytest.raises(ValueError, match=message):
        simulate(four_nodes(), swaps, Link(1.0, 1.0))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(bandwidth):
    with pytest.raises(ValueError, match="in_bandwidth"):
        Link(1.0, bandwidth)


@pytest.mark.parametrize("latency", [-1e-6, float("inf"), float("nan")])
def test_a_latency_that_is_no_duration_is_refused(latency):
    with pytest.raises(ValueError, match="latency"):
        Link(1.0, 1.0, latency)
