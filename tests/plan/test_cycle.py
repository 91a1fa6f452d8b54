"""The cycle of update, forward and backward: its timing as defined, its memory, and its bound below every plan."""

import itertools

import naive
import numpy as np
import pytest

from offload.plan import (
    Link,
    StateChunk,
    Update,
    cycle,
    cycle_bound,
    cycle_bytes,
    joint_bound,
    simulate,
    simulate_cycle,
)
from offload.plan.cycle import freed, unrolled
from offload.plan.simulate import Swap, resident_bytes
from offload.plan.trace import Node, SavedTensor, Trace


def random_cycle(seed, node_count=4, tensor_count=1, chunk_count=2):
    """Return a small cycle: forward and backward with all state as base bytes, its update, a link."""
    rng = np.random.default_rng(seed)
    nodes = tuple(
        Node(f"n{k}", float(rng.choice([0.0, 0.5, 1.0, 2.0])), 2 * k >= node_count) for k in range(node_count)
    )
    chunks = tuple(
        StateChunk(int(rng.integers(1, 9)), float(rng.choice([0.0, 0.25, 1.0])), f"c{i}") for i in range(chunk_count)
    )
    update = Update(chunks, int(rng.integers(0, 12)), int(rng.integers(0, 12)))
    tensors = []
    for i in range(tensor_count):
        packed, first = sorted(rng.choice(node_count, 2, replace=False).tolist())
        tensors.append(SavedTensor(i, int(rng.integers(1, 9)), packed, packed, packed, first, first))
    base = tuple(int(x) + update.bytes for x in rng.integers(0, 5, node_count))
    link = Link(*rng.choice([1.0, 2.0, 5.0, 20.0], 2).tolist())
    return Trace(nodes, base, tuple(tensors)), update, link


def every_plan(trace, update):
    """Yield all swaps of saved tensors with all ways to move chunks."""
    period, options = len(update.chunks) + len(trace.nodes), []
    for x in trace.tensors:
        span = range(x.last_forward + 1, x.first_backward + 1)
        options.append([None, *(Swap(x.id, r, p) for r, p in itertools.combinations_with_replacement(span, 2))])
    for i in range(len(update.chunks)):
        span = range(i + 1, period + i + 1)
        options.append([None, *((i, pair) for pair in itertools.combinations_with_replacement(span, 2))])
    for chosen in itertools.product(*options):
        swaps = [each for each in chosen[: len(trace.tensors)] if each is not None]
        yield swaps, dict(each for each in chosen[len(trace.tensors) :] if each is not None)


def peak(trace, update, swaps, away):
    """The most that is resident in forward and backward: `trace` has all state as base bytes."""
    chunks = len(update.chunks)
    counts = list(resident_bytes(trace, swaps))
    for i, (release, prefetch) in away.items():
        for k in range(len(counts)):
            counts[k] -= update.chunks[i].bytes if release <= chunks + k < prefetch else 0
    return max(counts)


def long_run_seconds(trace, update, link, swaps, away, periods=12):
    """What a period takes on average once the cycle has repeated itself for some time."""
    whole, every = unrolled(trace, swaps, update, away, periods)
    finish = simulate(whole, every, link).finish
    period = len(update.chunks) + len(trace.nodes)
    return (finish[periods * period - 1] - finish[periods // 2 * period - 1]) / (periods - periods // 2)


def check_bound(seed):
    """Compare the bound with every plan of a small cycle. Returns whether the fastest one reaches it."""
    trace, update, link = random_cycle(seed)
    plans = [(peak(trace, update, *plan), plan) for plan in every_plan(trace, update)]
    reached = []
    for limit in sorted({nbytes for nbytes, _ in plans})[::3]:
        bound = cycle_bound(trace, limit, link, update)
        found = min(long_run_seconds(trace, update, link, *plan) for nbytes, plan in plans if nbytes <= limit)
        assert bound <= found * (1 + 1e-9), (seed, limit, bound, found)
        reached.append(bound >= found * (1 - 1e-6))
    return any(reached)


@pytest.mark.parametrize(("seed", "is_reached"), [(0, True), (1, True), (3, False)])
def test_no_plan_of_a_small_cycle_is_faster_than_the_bound(seed, is_reached):
    assert check_bound(seed) == is_reached


BROKEN = {
    "state that leaves is not resident": ("freed", lambda trace, nbytes: trace),
    "copies of a cell are those of its left end": ("pairwise", lambda ends: [(b, b) for b in ends[1:]]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_bound_that_is_none_is_noticed(broken, monkeypatch):
    name, wrong = BROKEN[broken]
    monkeypatch.setattr(cycle, name, wrong)
    if name == "pairwise":
        monkeypatch.setattr(cycle, "_CELLS", 1)
    with pytest.raises(AssertionError):
        list(map(check_bound, range(8)))


@pytest.mark.full
def test_no_plan_of_many_small_cycles_is_faster_than_the_bound():
    assert sum(check_bound(seed) for seed in range(100, 160)) == 29


def test_the_bound_is_infinite_where_no_share_is_enough():
    trace, update, link = random_cycle(1, tensor_count=0)
    least = max(trace.base_bytes) - update.bytes
    assert cycle_bound(trace, least, link, update) < float("inf")
    assert cycle_bound(trace, least - 1, link, update) == float("inf")


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_least_of_all_cells(seed):
    """The bisection finds what trying each number of bytes finds, within the width of a cell."""
    trace, update, link = random_cycle(seed, node_count=8, tensor_count=4, chunk_count=5)
    slow, limit = min(link.out_bandwidth, link.in_bandwidth), max(resident_bytes(trace, [])) - update.bytes // 2

    def of(nbytes):
        return max(update.seconds + joint_bound(freed(trace, nbytes), limit, link), nbytes / slow)

    exact = min(of(nbytes) for nbytes in range(update.bytes + 1))
    assert cycle_bound(trace, limit, link, update) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_the_second_of_two_periods_is_timed(seed):
    trace, update, link = random_cycle(seed, node_count=8, tensor_count=4, chunk_count=5)
    rng = np.random.default_rng(seed)
    moved = {i for i in range(5) if rng.random() < 0.7}
    swaps = [Swap(*each) for each in naive.random_swaps(trace, seed)]
    period = 5 + len(trace.nodes)
    away = {i: (period + back if out is None else out, period + back) for i, (out, back) in update.swaps(moved).items()}
    whole, every = unrolled(trace, swaps, update, away, 2)
    finish = naive.timing(whole, every, link.out_bandwidth, link.in_bandwidth, 0.0)[2]
    copies = update.bytes_of(moved) / min(link.out_bandwidth, link.in_bandwidth)
    found = simulate_cycle(trace, swaps, link, update, moved)
    assert found.seconds == pytest.approx(max(finish[2 * period - 1] - finish[period - 1], copies))
    assert found.seconds >= cycle_bound(trace, max(resident_bytes(trace, swaps)), link, update) * (1 - 1e-9)


def test_further_micro_batches_take_as_long_as_they_do_alone():
    trace, update, link = random_cycle(5)
    more = Update(update.chunks, update.ahead_bytes, update.behind_bytes, micro_batches=4)
    one, four = (simulate_cycle(trace, [], link, each, {0, 1}) for each in (update, more))
    assert four.seconds == pytest.approx(one.seconds + 3 * sum(node.seconds for node in trace.nodes))
    limit = max(trace.base_bytes)
    assert cycle_bound(trace, limit, link, more) <= four.seconds * (1 + 1e-9)


def literally(update, moved):
    """The window of a mover, chunk by chunk: bytes in memory during each update, and after the last one."""
    chunks, most = update.chunks, 0
    kept = sum(chunk.bytes for i, chunk in enumerate(chunks) if i not in moved)
    begun, reading, writing = 0, set(), []
    for number in range(len(chunks)):
        while begun < len(chunks):
            ahead = sum(chunks[i].bytes for i in reading if i > number)
            if begun > number + 1 and ahead >= update.ahead_bytes:
                break
            reading |= {begun} & set(moved)
            begun += 1
        most = max(most, kept + sum(chunks[i].bytes for i in [*reading, *writing]))
        if number in reading:
            reading.remove(number)
            writing.append(number)
            while len(writing) > 1 and sum(chunks[i].bytes for i in writing) > update.behind_bytes:
                writing.pop(0)
    return most, kept + sum(chunks[i].bytes for i in writing)


@pytest.mark.parametrize("seed", range(40))
def test_the_memory_is_that_of_a_mover(seed):
    _, update, _ = random_cycle(seed, chunk_count=9)
    rng = np.random.default_rng(seed)
    moved = {i for i in range(9) if rng.random() < rng.choice([0.3, 0.7, 1.0])}
    most, between = cycle_bytes(update, moved)
    expected_most, expected_between = literally(update, moved)
    # What still is written as forward begins may be so as the next update begins.
    assert expected_most <= most <= expected_most + (expected_between - update.bytes + update.bytes_of(moved))
    allowed = min(update.bytes_of(moved), update.behind_bytes)
    assert between == max(expected_between, update.bytes - update.bytes_of(moved) + allowed)
