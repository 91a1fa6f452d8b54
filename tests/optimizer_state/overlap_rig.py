"""Training loops whose state is copied in forward and backward too, and how much of it is in memory meanwhile."""

import warnings
from unittest import mock

import pytest
import torch
from optimizer_state import loops
from optimizer_state.planned_loops import SLACK, Wide, disable, planned, present_bytes, train
from optimizer_state.state_rig import assert_equal
from torch import nn

from offload.control.promise import SlowdownPromise
from offload.control.state_plan import StatePlanner
from offload.optimizer_state import mover
from offload.optimizer_state.share import Share
from offload.optimizer_state.streamed_state import StreamedState
from offload.plan import Link, StateOverlap, state_overlap
from offload.plan.cycle import CycleTiming

NO_TIMING = CycleTiming(1.0, 1.0)


def as_wide_as_can_be(plan, update, moved, counted_bytes, held_bytes, *, noise):
    """All state is written until forward ends, and read from the first backward node on."""
    nodes, total = plan.trace.nodes, update.bytes_of(moved)
    forward = [n for n, node in enumerate(nodes) if n and not node.backward]
    backward = [n for n, node in enumerate(nodes) if node.backward]
    writes = tuple((n, total * (len(forward) - 1 - i) // len(forward)) for i, n in enumerate(forward))
    reads = tuple((n, total * (i + 1) // len(backward)) for i, n in enumerate(backward))
    return StateOverlap(total, writes, reads, NO_TIMING, NO_TIMING)


def move_all(monkeypatch):
    """All state moves, by the first plan: while others are searched for, copies do not overlap with the passes."""
    monkeypatch.setattr(StatePlanner, "_moved_by_others", lambda self, planned: 99)
    monkeypatch.setattr(SlowdownPromise, "needs_plan", lambda promise, planned: False)


@pytest.fixture
def wide_overlap(monkeypatch, reasons):
    """All state moves, and is in memory for as much of both passes as can be."""
    move_all(monkeypatch)
    monkeypatch.setattr("offload.control.state_plan.state_overlap", as_wide_as_can_be)


def coming(loop):
    tensors = loop.optimizer.state.tensors.values() if isinstance(loop.optimizer.state, StreamedState) else ()
    return [each for every in tensors for each in every if each._is_coming]


class UnusedLater(loops.Loop):
    """A parameter whose state is read ahead gets no gradient, and the next step changes its group."""

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        unused = self.model[2].weight
        if number in (9, 13):
            unused.grad = None
        timed = Share.timed

        def looking(share, chunk):
            state = self.optimizer.state
            if unused.grad is None and isinstance(state, StreamedState):
                assert not any(each._is_coming for each in state.tensors[unused])
            return timed(share, chunk)

        with mock.patch.object(Share, "timed", looking):
            self.optimizer.step()
        if number == 14:
            self.optimizer.param_groups[0]["params"].reverse()


def bits_are_equal(kind, folder, _=None):
    plain = kind(False, folder).train()
    loop, found = train(planned(kind, "64MiB"), folder)
    assert_equal(found, plain)
    assert loop.handle.report().optimizer_state[0].early_bytes > 0
    disable(loop)
    assert_equal([each.state_dict() for each in loop.optimizers], list(found[2:]))


class Heavy(Wide):
    """Activations are larger than the state, so there is room for it as forward begins and backward ends."""

    micro_batches = 1

    def loss(self):
        return self.model(torch.randn(512, 60, generator=self.generator)).square().mean()

    def step(self, number):
        for _ in range(self.micro_batches - 1):
            self.loss().backward()
        super().step(number)


class Deviates(Heavy):
    """From the eighth layer on, later steps save other tensors than the recorded one."""

    def step(self, number):
        if number == 15:
            self.model[8] = nn.Sequential(self.model[8], nn.Softplus())
        super().step(number)


class MicroBatches(Heavy):
    micro_batches = 2

    def step(self, number):
        self.micro_batches = 3 if number == 9 else 2
        super().step(number)


def memory_as_planned(kind, folder, monkeypatch):
    """All state moves. At each layer, in both passes, it needs at most what the plan leaves free there.

    Copy-outs begin only where the step waits for one, so that state is written as late as it may be.
    """
    plain = kind(False, folder).train()
    move_all(monkeypatch)
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: Link(50e6, 50e6))  # copies take longer than updates
    monkeypatch.setattr("offload.plan.overlap._SHARES", [(1.0, 1.0)])
    # However little the overlap gains: on a busy machine, updates take longer than copies.
    monkeypatch.setattr("offload.control.state_plan.state_overlap", lambda *args, noise: state_overlap(*args, noise=-1))
    loop = planned(kind, "64MiB")(True, folder)
    found = {"in forward": [], "in backward": [], "in update": [0], "late": 0}

    def look(when):
        planned_step, place = loop.handle._controller.latest(), loop.handle._controller.running.place()
        if planned_step is None or planned_step.overlap is None:
            return
        loop.optimizer.state.engine.store.defer_copy_outs(True)
        assert when == "in backward" or not coming(loop)  # state that was read for an update that did not come is gone
        if place is None:
            assert present_bytes(loop) <= mover.BEHIND_BYTES + SLACK
            found["late"] += 1
            return
        plan, node = place
        free = plan.peak_bytes - plan.timing.resident[node] + plan.state.between_bytes
        found[when].append(present_bytes(loop))
        assert found[when][-1] <= free + SLACK

    for layer in loop.model:
        layer.register_forward_hook(lambda *_: look("in forward"))
        layer.register_full_backward_hook(lambda *_: look("in backward"))
    timed = Share.timed

    def looking(self, chunk):
        found["in update"].append(present_bytes(loop))
        return timed(self, chunk)

    with mock.patch.object(Share, "timed", looking), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the input of the first layer needs no gradient
        assert_equal(loop.train(), plain)
    assert not coming(loop)
    disable(loop)
    return loop, found
