"""The bounds of choices of what to do with each tensor: against every plan of small steps."""

import itertools
import math
import random

import pytest
from some_rows import one_in
from test_exact import every_plan
from test_joint_bound import drop_sets, instances

from offload.plan import Link, recomputed, resident_bytes, simulate
from offload.plan.certify.choices import DROPPED, KEPT, SWAPPED, Choices
from offload.plan.trace import Node, Recompute, SavedTensor, Trace


def chain_of(sizes, seconds=1.0):
    """Return a step of tensors of these bytes, each recomputed from the one before."""
    count = len(sizes)
    nodes = tuple(Node(str(k), 1.0, k >= count) for k in range(2 * count))
    tensors = tuple(
        SavedTensor(i, size, i, i, i, 2 * count - 1 - i, 2 * count - 1 - i, Recompute(seconds, (i - 1,)) if i else None)
        for i, size in enumerate(sizes)
    )
    return Trace(nodes, (0,) * (2 * count), tensors)


def fastest_by_choices(trace, link, limit):
    """Return for each way to keep, swap or drop every tensor the shortest step time of all plans within the limit."""
    fastest = {}
    for dropped in drop_sets(trace):
        step = recomputed(trace, dropped)
        for swaps in every_plan(step):
            if max(resident_bytes(step, swaps)) <= limit:
                done = dict.fromkeys(dropped, DROPPED) | {swap.id: SWAPPED for swap in swaps}
                key = tuple(done.get(tensor.id, KEPT) for tensor in trace.tensors)
                fastest[key] = min(fastest.get(key, math.inf), simulate(step, swaps, link).step_seconds)
    return fastest


def least_of(fastest, places, chosen):
    """Return the shortest step time of the plans with these choices, made for the tensors at these places."""
    known = [all(key[i] == choice for i, choice in zip(places, chosen, strict=False)) for key in fastest]
    return min(itertools.compress(fastest.values(), known), default=math.inf)


def compare(trace, link, limit, rng):
    """Check each choice for the first tensors in two orders; return how many bounds are reached by a plan."""
    fastest = fastest_by_choices(trace, link, limit)
    place = {tensor.id: i for i, tensor in enumerate(trace.tensors)}
    reached = 0
    for shuffled in (False, True):
        choices = Choices(trace, link, limit)
        if shuffled:
            rng.shuffle(choices.order)
        places = [place[tensor.id] for tensor in choices.order]
        for count in range(len(places) + 1):
            for chosen in itertools.product(*(choices.options(tensor) for tensor in choices.order[:count])):
                least, best = choices.least_seconds(bytes(chosen)), least_of(fastest, places, chosen)
                assert least <= best * (1 + 1e-12), (chosen, places)
                reached += 0 < best < math.inf and least >= best * (1 - 1e-12)
    return reached


@pytest.mark.parametrize("part", one_in(2, range(8)))
def test_no_plan_with_some_choices_is_faster_than_their_bound(part):
    rng = random.Random(part)
    cases = instances(160, tensors_max=3, nodes_max=5)[part::8]
    assert sum(compare(trace, link, limit, rng) for trace, link, limit in cases) > 100


@pytest.mark.parametrize("part", range(4))
def test_no_plan_of_a_chain_with_some_choices_is_faster_than_their_bound(part):
    reached = 0
    for seed in range(part, 32, 4):
        rng = random.Random(seed)
        trace = chain_of([rng.randint(1, 9) for _ in range(4)], rng.choice([0.2, 0.5, 2.0]))
        link = Link(rng.choice([1.0, 3.0, 8.0]), rng.choice([1.0, 3.0, 8.0]), rng.choice([0.0, 0.3]))
        sizes = [tensor.bytes for tensor in trace.tensors]
        reached += compare(trace, link, rng.randint(max(sizes) + 1, sum(sizes)), rng)
    assert reached > 50


def step_of(*tensors, base_bytes=(0,) * 8):
    """Return a step of four nodes forward and four nodes backward, of one second each."""
    return Trace(tuple(Node(str(k), 1.0, k > 3) for k in range(8)), base_bytes, tensors)


def test_what_makes_no_difference_is_not_decided():
    tensors = (
        SavedTensor(0, 5, 3, 3, 3, 4, 4),
        SavedTensor(1, 0, 0, 0, 0, 7, 7),
        SavedTensor(2, 5, 3, 3, 3, 4, 4, Recompute(1.0, ())),
    )
    choices = Choices(step_of(*tensors), Link(1.0, 1.0), 10)
    assert [(tensor.id, choices.options(tensor)) for tensor in choices.order] == [(2, (KEPT, DROPPED))]


def test_tensors_that_are_kept_need_room():
    trace = step_of(
        SavedTensor(0, 5, 0, 0, 0, 7, 7), SavedTensor(1, 5, 1, 1, 1, 6, 6), base_bytes=(0, 0, 0, 1, 0, 0, 0, 0)
    )
    choices = Choices(trace, Link(1.0, 1.0), 10)
    assert choices.least_seconds(bytes([KEPT])) == 8.0
    assert choices.least_seconds(bytes([KEPT, KEPT])) == math.inf
    assert choices.least_seconds(bytes([KEPT, SWAPPED])) == 15.0, "copied out from 2 to 7 s, in from 8 to 13 s"


def test_a_tensor_whole_is_away_or_not():
    base = (0, 0, 0, 0, 14, 0, 0, 0)
    trace = step_of(SavedTensor(0, 5, 0, 0, 0, 7, 7), SavedTensor(1, 5, 0, 0, 0, 7, 7), base_bytes=base)
    both = bytes([SWAPPED, SWAPPED])
    assert Choices(trace, Link(100.0, 1.0), 18).least_seconds(both) == 16.0, "the room of 4 bytes helps none of them"
    assert Choices(trace, Link(100.0, 1.0), 19).least_seconds(both) == 11.0


def test_copies_in_of_many_tensors_are_bounded_without_their_subsets():
    base = (0, 0, 0, 0, 50, 0, 0, 0)
    tensors = [SavedTensor(i, 5, 0, 0, 0, 7, 7) for i in range(11)]
    choices = Choices(step_of(*tensors, base_bytes=base), Link(1e9, 1.0), 64)
    assert choices.least_seconds(bytes([SWAPPED] * 10)) == 46.0, "50 bytes but 10: two of ten fit into 14"
    assert choices.least_seconds(bytes([SWAPPED] * 11)) == 47.0, "55 bytes but 14"


def test_a_recomputation_counts_at_its_node_once_that_is_final():
    tensors = (
        SavedTensor(0, 4, 0, 0, 0, 7, 7, Recompute(2.0, ())),
        SavedTensor(1, 4, 1, 1, 1, 5, 5, Recompute(2.0, (0,))),
        SavedTensor(2, 9, 2, 2, 2, 6, 6),
    )
    choices = Choices(step_of(*tensors, base_bytes=(0, 0, 0, 0, 9, 0, 0, 0)), Link(100.0, 1.0), 17)
    choices.order.insert(0, choices.order.pop())
    assert [tensor.id for tensor in choices.order] == [2, 0, 1]
    assert choices.least_seconds(bytes([SWAPPED])) == 16.0, "copied in from 5 to 14 s"
    assert choices.least_seconds(bytes([SWAPPED, DROPPED])) == 16.0, "at node 5, during the copy, or at 7"
    assert choices.least_seconds(bytes([SWAPPED, DROPPED, KEPT])) == 18.0
    assert choices.least_seconds(bytes([SWAPPED, DROPPED, DROPPED])) == 16.0


def test_a_recomputation_is_final_only_if_those_that_start_from_it_are():
    tensors = (
        SavedTensor(0, 1, 0, 0, 0, 7, 7, Recompute(2.0, ())),
        SavedTensor(1, 1, 0, 0, 0, 7, 7, Recompute(2.0, (0,))),
        SavedTensor(2, 1, 1, 1, 1, 5, 5, Recompute(2.0, (1,))),
        SavedTensor(3, 9, 2, 2, 2, 6, 6),
    )
    choices = Choices(step_of(*tensors, base_bytes=(0, 0, 0, 0, 9, 0, 0, 0)), Link(100.0, 1.0), 17)
    choices.order.sort(key=lambda x: (-x.bytes, x.id))
    assert [tensor.id for tensor in choices.order] == [3, 0, 1, 2]
    assert choices.least_seconds(bytes([SWAPPED, DROPPED, DROPPED])) == 16.0, "at node 5 if the last one is dropped too"
    assert choices.least_seconds(bytes([SWAPPED, DROPPED, DROPPED, KEPT])) == 20.0
    assert choices.least_seconds(bytes([SWAPPED, DROPPED, DROPPED, DROPPED])) == 16.0


def test_undecided_tensors_of_the_fullest_node_are_copied_or_recomputed():
    tensors = (
        SavedTensor(0, 5, 0, 0, 0, 7, 7),
        SavedTensor(1, 4, 1, 1, 1, 6, 6, Recompute(2.0, ())),
        SavedTensor(2, 4, 2, 2, 2, 5, 5),
    )
    trace = step_of(*tensors, base_bytes=(0, 0, 0, 5, 5, 0, 0, 0))
    bounds = {limit: Choices(trace, Link(1.0, 100.0), limit).least_seconds(b"") for limit in (18, 16, 14, 10)}
    assert bounds[18] == 8.0
    assert bounds[16] == 8.0, "2 bytes: copied from 1 to 3 s, before node 3"
    assert bounds[14] == 9.0, "4 bytes: half of tensor 1 is recomputed"
    assert bounds[10] == 12.0, "8 bytes: 4 are recomputed, and node 3 waits for copies of 4 until 5 s"


def test_undecided_tensors_are_copied_behind_those_packed_before_them():
    tensors = (SavedTensor(0, 5, 0, 0, 0, 7, 7), SavedTensor(1, 4, 1, 1, 1, 6, 6, Recompute(2.0, ())))
    trace = step_of(*tensors, base_bytes=(0, 0, 0, 6, 0, 0, 0, 0))
    assert Choices(trace, Link(1.0, 100.0), 15).least_seconds(bytes([SWAPPED])) == 8.0
    least = Choices(trace, Link(1.0, 100.0), 9).least_seconds(bytes([SWAPPED]))
    assert least == 11.5, "node 3 waits until 6 s, then a quarter of tensor 1 is recomputed"


def test_undecided_tensors_that_are_recomputed_do_not_wait_for_copies():
    tensors = (SavedTensor(0, 5, 0, 0, 3, 7, 7), SavedTensor(1, 4, 1, 1, 1, 6, 6, Recompute(2.0, ())))
    choices = Choices(step_of(*tensors, base_bytes=(0, 0, 0, 1, 0, 0, 0, 0)), Link(1.0, 100.0), 9)
    assert choices.least_seconds(bytes([SWAPPED])) == 8.5, "a quarter of tensor 1; tensor 0 is copied until 6 s"


def test_recomputations_of_undecided_tensors_may_be_as_late_as_the_last_of_them():
    tensors = (
        SavedTensor(0, 9, 0, 0, 0, 6, 6),
        SavedTensor(1, 4, 1, 1, 1, 5, 5, Recompute(2.0, ())),
        SavedTensor(2, 4, 2, 2, 2, 7, 7, Recompute(2.0, ())),
    )
    choices = Choices(step_of(*tensors, base_bytes=(0, 0, 0, 13, 0, 5, 0, 0)), Link(1.0, 1.0), 17)
    assert choices.least_seconds(bytes([SWAPPED])) == 24.0, "out until 10 s, in from 13 to 22 s, nodes 6 and 7"


def test_a_source_that_forward_still_uses_is_counted_once():
    tensors = (SavedTensor(0, 5, 0, 0, 5, 7, 7), SavedTensor(1, 1, 1, 1, 1, 4, 4, Recompute(2.0, (0,))))
    choices = Choices(step_of(*tensors), Link(1.0, 1.0), 6)
    assert [tensor.id for tensor in choices.order] == [0, 1]
    assert choices.least_seconds(bytes([KEPT, DROPPED])) == 10.0
    assert choices.least_seconds(bytes([SWAPPED, DROPPED])) == 10.0


def test_tensors_are_decided_after_those_from_which_they_are_recomputed():
    links = {1: (3,), 2: (1,), 3: (0,)}
    tensors = [
        SavedTensor(i, 1, i, i, i, 7 - i, 7 - i, Recompute(1.0, links[i]) if i in links else None) for i in range(4)
    ]
    assert [tensor.id for tensor in Choices(step_of(*tensors), Link(1.0, 1.0), 4).order] == [0, 3, 1, 2]
