"""Optimizer state that is written in forward and read in backward: no more memory, and the predicted time."""

from itertools import accumulate

import naive
import numpy as np
import pytest
from test_cycle import random_cycle

from offload.plan import cycle_bound, cycle_bytes, make_plan, state_overlap
from offload.plan import overlap as overlap_module
from offload.plan.cycle import freed, unrolled
from offload.plan.simulate import Swap, resident_bytes

MODULE = "offload.plan.overlap"
SEEDS = range(60)


def random_case(seed):
    """Return a plan of forward and backward, its update, the chunks that move, what is held in the update."""
    trace, update, link = random_cycle(seed, node_count=12, tensor_count=6, chunk_count=9)
    rng = np.random.default_rng(seed)
    moved = {i for i in range(9) if rng.random() < rng.choice([0.3, 0.7, 1.0])} or {0}
    between = cycle_bytes(update, moved)[1]
    swaps = [Swap(*each) for each in naive.random_swaps(trace, seed)]
    plan = make_plan(freed(trace, update.bytes - between), link, swaps)
    return plan, update, moved, between, int(rng.integers(0, max(2, plan.peak_bytes)))


def literally(plan, update, moved, overlap):
    """Follow the rows as the movers do. Returns the state in memory in each chunk's update and in each node."""
    chunks, kept = update.chunks, update.bytes - update.bytes_of(moved)
    behind = update.behind_bytes if overlap is None else max(update.behind_bytes, overlap.behind_bytes)
    writes, reads = ({}, {}) if overlap is None else (dict(overlap.writes), dict(overlap.reads))
    order = sorted(moved)

    def size(numbers):
        return sum(chunks[i].bytes for i in numbers)

    coming, writing = set(), []
    for _period in range(3):
        in_update, in_passes, begun = [], [], 0
        for number in range(len(chunks)):
            while begun < len(chunks):
                ahead = sum(chunks[i].bytes for i in moved if number < i < begun)
                if begun > number + 1 and ahead >= update.ahead_bytes:
                    break
                coming |= {begun} & moved
                writing = [i for i in writing if i != begun]  # it gets its memory back
                begun += 1
            in_update.append(kept + size(coming) + size(writing))
            if number in moved:
                coming.remove(number)
                writing.append(number)
                while len(writing) > 1 and size(writing) > behind:
                    writing.pop(0)
        for node in range(len(plan.trace.nodes)):
            while len(writing) > 1 and size(writing) > writes.get(node, size(writing)):
                writing.pop(0)
            if node in reads:
                ends = accumulate(chunks[i].bytes for i in order)
                early = {i for i, end in zip(order, ends, strict=True) if end <= reads[node]}
                writing = [i for i in writing if i not in early]
                coming |= early
            in_passes.append(kept + size(coming) + size(writing))
    return in_update, in_passes


def check_memory(seed):
    """Compare with the peaks that the plan and the update have without overlap. Returns the overlap."""
    plan, update, moved, counted, held = random_case(seed)
    overlap = state_overlap(plan, update, moved, counted, held, noise=0.0)
    if overlap is None:
        return None
    between = cycle_bytes(update, moved)[1]
    in_update, in_passes = literally(plan, update, moved, overlap)
    passes = [found - between + own for found, own in zip(plan.timing.resident, in_passes, strict=True)]
    assert max(passes) <= plan.peak_bytes, seed
    before = held + cycle_bytes(update, moved)[0]
    assert held + max(in_update) <= max(plan.peak_bytes, before), seed
    return overlap


def test_no_moment_needs_more_memory_than_without_overlap():
    found = [overlap for overlap in map(check_memory, SEEDS) if overlap is not None]
    assert len(found) > 15
    assert sum(bool(each.writes) for each in found) > 3
    assert sum(bool(each.reads) for each in found) > 8


PEAKS = overlap_module._Room._peaks
BROKEN = {
    "what fits is not checked": ("_Room.fits", lambda room, away: True),
    "the update is not checked": ("_Room._peaks", lambda room, away: (PEAKS(room, away)[0], 0)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_overlap_that_needs_more_memory_is_noticed(broken, monkeypatch):
    name, wrong = BROKEN[broken]
    monkeypatch.setattr(f"{MODULE}.{name}", wrong)
    with pytest.raises(AssertionError):
        list(map(check_memory, SEEDS))


def test_the_time_is_that_of_the_second_period():
    for seed in SEEDS:
        plan, update, moved, counted, held = random_case(seed)
        overlap = state_overlap(plan, update, moved, counted, held, noise=0.0)
        if overlap is None:
            continue
        away = overlap_module._schedule_of(update, moved, len(plan.trace.nodes), overlap)
        whole, every = unrolled(plan.trace, plan.swaps, update, away, 2)
        finish = naive.timing(whole, every, plan.link.out_bandwidth, plan.link.in_bandwidth, 0.0)[2]
        period = 9 + len(plan.trace.nodes)
        copies = update.bytes_of(moved) / min(plan.link.out_bandwidth, plan.link.in_bandwidth)
        assert overlap.timing.seconds == pytest.approx(max(finish[2 * period - 1] - finish[period - 1], copies))
        limit = max(resident_bytes(plan.trace, plan.swaps))
        assert cycle_bound(plan.trace, limit, plan.link, update) <= overlap.timing.seconds * (1 + 1e-9)
        assert overlap.timing.seconds < overlap.baseline_timing.seconds


def test_there_are_none_without_moved_state_or_for_less_than_the_noise():
    plan, update, _, counted, held = random_case(0)
    assert state_overlap(plan, update, (), counted, held) is None
    gains = []
    for seed in SEEDS:
        case = random_case(seed)
        overlap = state_overlap(*case, noise=0.0)
        if overlap is not None:
            gain = 1 - overlap.timing.seconds / overlap.baseline_timing.seconds
            gains.append(gain)
            assert (state_overlap(*case, noise=0.05) is None) == (gain <= 0.05)
    assert min(gains) < 0.05 < max(gains)
