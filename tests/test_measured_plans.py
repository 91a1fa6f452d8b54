"""What steps measure changes their plan: slower and faster links, late tensors, durations."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from planned_rig import LINK, batch, enabled, known_link, make, plain_run, told_blocks, train  # noqa: F401
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.control.phase import Phase
from offload.control.step_cost import without_slowing
from offload.plan import Link, simulate
from offload.plan.late import with_earlier_prefetches


def test_predicted_and_measured_stand_side_by_side(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 4)
        about = handle.report().to_dict()
        verdict = about["verdict"]
        assert verdict["step_seconds_planned"] == handle.plan.expected_seconds
        assert verdict["step_seconds"] > 0
        assert verdict["step_bytes_planned"] == handle.plan.peak_bytes
        assert (verdict["kind"], verdict["reason"]) == ("planned", "")
        planned = [row for row in about["steps_measured"] if not row["profiled"]]
        assert planned
        assert all(0 <= row["paused_seconds"] <= row["seconds"] for row in planned)
        planned = handle._on_device.latest()
        assert len(planned.starts) == len(handle.plan.timing.start)
        assert list(planned.starts) == sorted(planned.starts)
        assert "predicted" in str(handle.report())
        assert "released at node" in handle.plan.explain()


def test_a_slower_link_is_planned_anew_and_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, link: Link(1e6, 1e6))
    _, plain_peak = plain_run([512] * 4, blocks=3)
    model, optimizer = make(blocks=3)
    options = {"memory_limit": int(0.6 * plain_peak), "spill_dir": tmp_path, "recompute": False}
    with caplog.at_level(logging.INFO, "offload"), enabled(model, **options) as handle:
        train(model, optimizer, [512] * 12)
        assert "copy-out is slower than planned" in caplog.text
        assert (handle.plan.link.out_bandwidth, handle.plan.link.in_bandwidth) == (1e6, 1e6)
        assert 1 <= handle._on_device.latest().replans <= LIMITS.replans
        assert caplog.text.count("planning again") <= LIMITS.replans


def test_steady_steps_are_measured_now_and_then(tmp_path):
    model, optimizer = make(blocks=3)
    with enabled(model, memory_limit="1GiB", spill_dir=tmp_path) as handle:
        handle._controller._limits = replace(LIMITS, steady_measured_every=4, tolerance=math.inf, faster_link=math.inf)
        train(model, optimizer, [512] * 6)
        (state,) = handle._controller.states.values()
        assert state.phase is Phase.STEADY
        before = handle.report()
        train(model, optimizer, [512] * 16)
        after = handle.report()
        assert len(after.steps_measured) - len(before.steps_measured) == 16 // 4
        assert after.unmeasured_steps - before.unmeasured_steps == 16 - 16 // 4


def test_durations_are_of_computation_without_what_copies_slow_it_by(tmp_path, monkeypatch):
    """Copies that are said to take much of the processor make the same step's own computation shorter."""
    assert without_slowing((1.0, 3.0), 1.0) == (0.75, 2.25)
    assert without_slowing((1.0, 3.0), 100.0) == (0.5, 1.5)
    assert without_slowing((0.0,), 1.0) == (0.0,)
    model, optimizer = make()
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: replace(LINK, byte_seconds=1e-9))
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 6)
        plan = handle.plan
        assert plan.swaps
        moved = sum(tensor.bytes for tensor in plan.trace.tensors if tensor.id in {swap.id for swap in plan.swaps})
        hooks = len(plan.swaps) * plan.link.swap_seconds
        assert plan.overhead_seconds == pytest.approx(moved * 1e-9 + hooks)
        assert hooks > 0
        (planned,) = [state.planned for state in handle._controller.states.values()]
        measured = handle.report().steps_measured
        steps = [record for record in measured if not record.profiled and not record.is_reference]
        steps = steps[-len(planned.node_seconds) :]
        whole = [sum(row) for row in planned.node_seconds]
        assert all(mine < record.seconds for mine, record in zip(whole, steps, strict=True))


def test_a_faster_link_gives_memory_back(tmp_path, monkeypatch):
    """What the slow link forbade within the slowdown, the faster one allows."""
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: Link(1e3, 1e3))
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, link: Link(1e12, 1e12))
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 2)
        before = handle.plan
        assert not before.swaps, "nothing is worth it"
        train(model, optimizer, [512] * 3)
        assert (handle.plan.link.out_bandwidth, handle.plan.link.in_bandwidth) == (1e12, 1e12)
        assert handle.plan.peak_bytes < before.peak_bytes


def test_a_late_tensor_comes_back_earlier_where_there_is_room(tmp_path):
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 2)
        plan = handle.plan
        swap = next(s for s in plan.swaps if s.prefetch > s.release)
        late = {swap.id: plan.step_seconds}
        longer = with_earlier_prefetches(plan, late, plan.unswapped_peak_bytes)
        moved = next(s for s in longer.swaps if s.id == swap.id)
        assert moved.prefetch < swap.prefetch
        assert simulate(plan.trace, longer.swaps, plan.link).peak_bytes == longer.peak_bytes
        tight = with_earlier_prefetches(plan, late, plan.peak_bytes)
        assert tight.peak_bytes <= plan.peak_bytes


def test_what_somebody_else_holds_is_no_candidate(tmp_path):
    """The batch that the training loop still holds: moving it would free nothing."""
    model, optimizer = make(blocks=1)
    with enabled(model, spill_dir=tmp_path) as handle:
        x, y = batch(4096, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        assert x.nbytes in {entry.nbytes for entry in handle._controller.latest().profile.order.entries.values()}
        produced_by_input = [t for t in handle.trace().tensors if t.packed == 0]
        assert not produced_by_input
        del x, y
        optimizer.step()


class TwoLosses(nn.Module):
    """Two halves that share nothing; each has a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in "ab")

    def forward(self, x):
        return [half(x).square().mean() for half in self.halves]


def test_every_backward_pass_of_a_step_is_measured(tmp_path):
    model = TwoLosses()
    with offload.enable(
        model, max_slowdown=100.0, min_tensor_bytes=1024, spill_dir=tmp_path, recompute=False
    ) as handle:
        for _ in range(4):
            first, second = model(torch.ones(512, 256))
            second.backward()
            first.backward()
        backward = [node for node in handle.trace().nodes if node.backward]
        assert len(backward) >= 4
        assert all(node.seconds > 0 for node in backward)


def test_a_second_pass_over_the_same_nodes_is_not_part_of_the_step(tmp_path):
    """It would make the last node seem as long as the whole pass."""
    model, optimizer = make()
    with enabled(model, max_slowdown=100.0, spill_dir=tmp_path, recompute=False) as handle:
        ends = []
        for _ in range(5):
            loss = model(batch(512, 0)[0]).square().mean()
            loss.backward(retain_graph=True)
            planned = handle._on_device.controller.main
            executors = [] if planned is None else [each for each in planned.executors if each.stopwatch.finished]
            ends.append([each.measured(1).step_seconds for each in executors])
            loss.backward()
            again = [each.measured(1).step_seconds for each in executors]
            assert again == ends[-1]
            optimizer.zero_grad()
        assert any(ends)
