"""Tensors of which a swap copies only a part, since only views of parts of their storages are saved."""

from dataclasses import replace

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from page_check import charts_of
from test_exact import every_plan
from test_joint_bound import drop_sets, instances
from torch import nn

import offload
from offload.control.tried_plan import TriedPlan
from offload.diagnostics.html.plan import render
from offload.plan import Link, Swap, cut_bound, fastest_plan, joint_bound, prove_joint, simulate
from offload.plan.bounds import cut_bounds, least_feasible_limit, with_copied_bytes
from offload.plan.certify.choices import DROPPED, KEPT, SWAPPED, Choices
from offload.plan.cycle import StateChunk, Update, unrolled
from offload.plan.joint_step import JointSteps
from offload.plan.placement import Step
from offload.plan.recompute import recomputed
from offload.plan.rescale import in_proportion
from offload.plan.simulate import resident_bytes, unswapped_bytes
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

NODES = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
VIEW = SavedTensor(7, 12, 0, 0, 0, 3, 3, copy_bytes=4)
STEP = Trace(NODES, (0, 0, 0, 0), (VIEW,))


def test_copies_take_the_time_of_the_part_and_free_the_whole():
    timing = simulate(STEP, [Swap(7, release=1, prefetch=3)], Link(4.0, 8.0))
    assert (timing.step_seconds, timing.resident) == (4 + 1.0 + 0.5, (12, 0, 0, 12))


def test_the_bound_counts_the_copied_part():
    step = replace(STEP, base_bytes=(0, 0, 6, 0))
    assert cut_bound(step, 12, Link(1.0, 1.0)) == 4.0  # without the 8 bytes that are freed and not copied, all fits
    assert cut_bound(step, 9, Link(1.0, 1.0)) == float("inf")  # 12 while the tensor is in use
    step = replace(STEP, base_bytes=(0, 0, 12, 0))
    whole = replace(step, tensors=(replace(VIEW, copy_bytes=None),))
    for bound in (cut_bound, joint_bound):
        assert bound(step, 12, Link(1.0, 1.0)) == 1 + 4 + 1 + 4 + 1
        assert bound(whole, 12, Link(1.0, 1.0)) == 1 + 12 + 1 + 12 + 1
    assert simulate(step, [Swap(7, 2, 3)], Link(1.0, 1.0)).step_seconds == 11.0


@given(naive.traces(), st.integers(0, 1000))
def test_copies_are_timed_by_the_rules(trace, seed):
    trace = naive.with_views(trace, seed)
    swaps = naive.random_swaps(trace, seed)
    assert simulate(trace, [Swap(*swap) for swap in swaps], Link(3.0, 7.0, 0.25)).finish == tuple(
        naive.timing(trace, swaps, 3.0, 7.0, 0.25)[2]
    )
    assert least_feasible_limit(with_copied_bytes(trace)) == least_feasible_limit(trace)
    assert Trace.from_dict(trace.to_dict()) == trace


@given(naive.traces(), st.integers(0, 1000), st.data())
def test_a_step_with_recomputation_keeps_the_parts(trace, seed, data):
    trace, link = naive.with_views(naive.with_recipes(trace, seed), seed), Link(3.0, 7.0, 0.25, 0.01, 0.001)
    dropped = [x.id for x in trace.tensors if x.recompute and data.draw(st.booleans())]
    expected, step = Step(recomputed(trace, dropped), link), JointSteps(trace, link).step(dropped)
    for name in ("ids", "bytes", "out_seconds", "in_seconds", "overhead_seconds"):
        assert getattr(step, name) == getattr(expected, name)


@pytest.mark.parametrize("part", range(4))
def test_no_plan_beats_the_bounds_of_small_steps(part):
    for seed, (trace, link, limit) in list(enumerate(instances(120)))[part::4]:
        trace = naive.with_views(trace, seed)
        plan = fastest_plan(trace, link, limit)
        assert plan.peak_bytes <= limit
        proof = prove_joint(plan, seconds_max=5)
        assert proof.bound_seconds <= proof.plan.step_seconds * (1 + 1e-12)
        assert joint_bound(trace, limit, link) <= proof.plan.step_seconds * (1 + 1e-12)
        swap_only = fastest_plan(recomputed(trace, ()), link, limit)
        assert cut_bounds(trace, limit, link).double <= swap_only.step_seconds * (1 + 1e-9)


@pytest.mark.long
def test_no_plan_beats_the_bound_of_its_choices():
    for seed, (trace, link, limit) in enumerate(instances(60, tensors_max=3, nodes_max=5)):
        trace = naive.with_views(trace, seed)
        choices = Choices(trace, link, limit)
        for dropped in drop_sets(trace):
            step = recomputed(trace, dropped)
            for swaps in every_plan(step):
                if max(resident_bytes(step, swaps)) > limit:
                    continue
                kinds = dict.fromkeys(dropped, DROPPED) | {swap.id: SWAPPED for swap in swaps}
                chosen = bytes(kinds.get(tensor.id, KEPT) for tensor in choices.order)
                seconds = simulate(step, swaps, link).step_seconds
                for count in range(len(chosen) + 1):
                    assert choices.least_seconds(chosen[:count]) <= seconds * (1 + 1e-12)


def test_a_proof_finds_the_plan_that_needs_the_short_copy():
    for seed, (trace, link, limit) in enumerate(instances(60, tensors_max=3, nodes_max=5)):
        trace = naive.with_views(trace, seed)
        best = min(
            simulate(step, swaps, link).step_seconds
            for step in (recomputed(trace, dropped) for dropped in drop_sets(trace))
            for swaps in every_plan(step)
            if max(resident_bytes(step, swaps)) <= limit
        )
        proof = prove_joint(fastest_plan(trace, link, limit), gap=0.0, seconds_max=20)
        assert proof.bound_seconds <= best * (1 + 1e-12)
        assert proof.plan.step_seconds == pytest.approx(best)


@given(naive.traces(), st.integers(0, 1000))
def test_a_placement_takes_as_long_as_its_plan(trace, seed):
    trace, link = naive.with_views(trace, seed), Link(3.0, 7.0, 0.25, 0.01, 0.001)
    step = Step(trace, link)
    placement = step.place(range(step.count), max(unswapped_bytes(trace)))
    swaps = step.swaps(placement)
    overhead = sum(link.overhead_seconds(x.copied_bytes) for x in trace.tensors if x.id in {swap.id for swap in swaps})
    assert placement.step_seconds == pytest.approx(simulate(trace, swaps, link).step_seconds + overhead)


def test_a_cycle_copies_the_part_in_each_period():
    whole, _ = unrolled(STEP, [], Update((StateChunk(5, 1.0),), 5, 5), {}, periods=2)
    assert [(x.bytes, x.copied_bytes) for x in whole.tensors] == [(12, 4)] * 2


def test_a_plan_swaps_where_only_the_part_has_to_be_copied():
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    step = Trace(nodes, (0, 0, 2, 2, 0, 0), (SavedTensor(0, 12, 0, 0, 0, 5, 5, copy_bytes=4),))
    plan = fastest_plan(step, Link(4.0, 4.0), 12)
    assert [swap.id for swap in plan.swaps] == [0]
    assert (plan.step_seconds, plan.host_bytes, plan.expected_seconds) == (6.0, 4, 6.0)
    assert replace(plan, link=Link(4.0, 4.0, byte_seconds=0.5)).overhead_seconds == 2.0
    assert TriedPlan(plan, 0.0, 0.0, 0.0, 3, 1.0, 0.0).copied_bytes == 4
    (chart,) = charts_of(render(plan, "a view"))
    copies = [nbytes for lane, boxes in chart["lanes"] if lane != "compute" for *_, nbytes, _ in boxes]
    assert copies == [4, 4]


def test_an_explanation_gives_the_time_of_the_copies_of_the_part():
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    view = SavedTensor(0, 12, 0, 0, 0, 5, 5, Recompute(0.25, ()), copy_bytes=4)
    plan = fastest_plan(Trace(nodes, (0, 0, 2, 2, 0, 0), (view,)), Link(0.5, 0.5), 12)
    assert [row.id for row in plan.recomputes] == [0]
    assert "its copies would take 16.000 s" in plan.explain()


def test_another_batch_copies_the_same_share():
    larger = in_proportion(STEP, 2, fixed_bytes=(0,) * 4).at(5)
    assert (larger.tensors[0].bytes, larger.tensors[0].copy_bytes) == (30, 10)


@pytest.mark.parametrize("copied", [0, 13, -1])
def test_a_part_is_a_part(copied):
    with pytest.raises(ValueError, match=r"tensors\[0\]\.copy_bytes"):
        Trace(NODES, (0,) * 4, (replace(VIEW, copy_bytes=copied),))


class LastThird(nn.Module):
    """Saves the last third of a storage, and nothing else of it."""

    def __init__(self):
        super().__init__()
        self.joined, self.after = nn.Linear(64, 192), nn.Linear(192, 8)

    def forward(self, x):
        return self.after(self.joined(x)[2 * len(x) // 3 :])


def test_a_recorded_view_counts_with_the_bytes_of_its_copy():
    model, x = LastThird(), torch.randn(3 * 128, 64)
    with offload.enable(model, memory_limit="8GiB", min_tensor_bytes=1) as handle:
        for _ in range(2):
            model(x).square().sum().backward()
        found = {tensor.bytes: tensor.copied_bytes for tensor in handle.trace().tensors}
    assert found[3 * 128 * 192 * 4] == 128 * 192 * 4
