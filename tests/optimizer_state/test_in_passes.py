"""Optimizer state that is written in forward and read in backward, where a plan leaves memory free: the same bits."""

import threading
from unittest import mock

import pytest
import torch
from optimizer_state import loops
from optimizer_state.overlap_rig import (
    Deviates,
    Heavy,
    MicroBatches,
    UnusedLater,
    as_wide_as_can_be,
    bits_are_equal,
    memory_as_planned,
    wide_overlap,
)
from optimizer_state.planned_loops import SLACK, disable, planned, present_bytes, reasons, train
from optimizer_state.state_rig import assert_equal
from planned_rig import known_link

from offload.control.state_plan import StatePlanner
from offload.optimizer_state import mover
from offload.optimizer_state.read_ahead import EarlyReads
from offload.optimizer_state.share import Share
from offload.optimizer_state.state_tensor import StateTensor
from offload.optimizer_state.streamed_state import StreamedState

__all__ = ["known_link", "reasons", "wide_overlap"]  # fixtures


class SkippedLater(loops.Scaler):
    """A step is skipped after its state was read ahead."""

    def step(self, number):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        if number in (2, 11, 12):
            self.model[0].weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Irregular(loops.Loop):
    """More micro-batches than before an update, then fewer."""

    def step(self, number):
        self.optimizer.zero_grad()
        for _ in range({9: 3, 14: 4}.get(number, 2 if number < 12 else 1)):
            self.loss().backward()
        self.optimizer.step()


class ClosureOfLast(loops.Loop):
    """The last micro-batch runs in the optimizer's step."""

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step(lambda: self.loss().backward())


class Read(loops.Loop):
    """State is read between backward and the update."""

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        if number in (9, 12):
            assert not any(value.isnan().any() for value in self.optimizer.state[self.model[2].weight].values())
        if number in (10, 12):
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.optimizer.step()


class FailsLater(loops.Loop):
    """An exception ends a step between backward and the update."""

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        if number in (9, 12):
            with pytest.raises(ZeroDivisionError):
                self.optimizer.step(lambda: 1 / 0)
            return
        self.optimizer.step()


OWN = [SkippedLater, Irregular, UnusedLater, Read, FailsLater]
KINDS = [loops.Loop, loops.Accumulation, loops.TwoOptimizers, *OWN]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bits_are_equal(kind, tmp_path, wide_overlap):
    bits_are_equal(kind, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", [k for k in loops.LOOPS if not k.knobs], ids=lambda kind: kind.__name__)
def test_bits_of_every_loop_are_equal(kind, tmp_path, wide_overlap):
    plain = kind(False, tmp_path).train()
    loop, found = train(planned(kind, "64MiB"), tmp_path)
    assert_equal(found, plain)
    disable(loop)


@pytest.mark.parametrize("kind", [loops.Loop, ClosureOfLast], ids=lambda kind: kind.__name__)
def test_all_state_moves_that_is_asked_to(kind, tmp_path, wide_overlap):
    """`optimizer_state=True`: no plan chooses what moves, and the overlap is planned all the same."""
    plain = kind(False, tmp_path).train()
    knobs = {"n_tensors": None, "memory_limit": "64MiB", "recompute": False}
    loop, found = train(type("Given", (kind,), {"knobs": knobs}), tmp_path)
    assert_equal(found, plain)
    assert loop.handle.report().optimizer_state[0].early_bytes > 0
    disable(loop)


def test_state_needs_no_more_memory_than_the_plan_leaves_free(tmp_path, monkeypatch, reasons):
    loop, found = memory_as_planned(Heavy, tmp_path, monkeypatch)
    total = sum(value.nbytes for state in loop.optimizer.state.values() for value in state.values())
    assert max(found["in update"]) <= total + SLACK
    for when in ("in forward", "in backward"):  # most of it is in memory there, but not in all nodes
        assert min(found[when]) < total / 2 < max(found[when])


@pytest.mark.parametrize("kind", [Deviates, MicroBatches], ids=lambda kind: kind.__name__)
def test_steps_that_differ_need_no_more_memory(kind, tmp_path, monkeypatch, reasons):
    loop, found = memory_as_planned(kind, tmp_path, monkeypatch)
    assert max(found["in forward"]) > 0
    assert (found["late"] > 0) == (kind is Deviates)
    (counts,) = loop.handle.report().optimizer_state
    assert 0 < counts.early_bytes <= counts.steps * counts.nbytes


def test_the_first_micro_batches_read_nothing(tmp_path, wide_overlap, monkeypatch):
    begin, begun = EarlyReads.begin, []
    monkeypatch.setattr(EarlyReads, "begin", lambda self, state, param: begun.append(1) or begin(self, state, param))

    def reads():
        begun.clear()
        loop, _ = train(planned(loops.Accumulation, "64MiB"), tmp_path)
        disable(loop)
        return len(begun)

    once = reads()
    monkeypatch.setattr(Share, "is_last_before_update", True)
    assert 0 < once < reads()


def test_where_no_memory_is_free_the_update_reads(tmp_path, wide_overlap, monkeypatch):
    begin, refused = EarlyReads.begin, []

    def refusing(self, state, param):
        if len(refused) == 5:
            return begin(self, state, param)
        refused.append(param)
        error = torch.OutOfMemoryError if len(refused) % 2 else MemoryError
        with mock.patch.object(StateTensor, "begin", side_effect=error):
            return begin(self, state, param)

    plain = loops.Loop(False, tmp_path).train()
    monkeypatch.setattr(EarlyReads, "begin", refusing)
    loop, found = train(planned(loops.Loop, "64MiB"), tmp_path)
    assert_equal(found, plain)
    (counts,) = loop.handle.report().optimizer_state
    assert counts.without_memory == len(refused) == 5
    assert counts.early_bytes > 0
    disable(loop)


def test_what_was_not_read_early_does_not_count(tmp_path, wide_overlap, monkeypatch):
    begin = EarlyReads.begin

    def refusing(self, state, param):
        with mock.patch.object(StateTensor, "begin", side_effect=MemoryError):
            return begin(self, state, param)

    monkeypatch.setattr(EarlyReads, "begin", refusing)
    loop, _ = train(planned(loops.Loop, "64MiB"), tmp_path)
    (counts,) = loop.handle.report().optimizer_state
    assert counts.without_memory > 0
    assert counts.early_bytes == 0
    disable(loop)


def test_an_evaluation_begins_with_little_state_in_memory(tmp_path, monkeypatch, reasons):
    """Copy-outs that no step waits for any more would hold their sources until training goes on."""
    monkeypatch.setattr(StatePlanner, "_moved_by_others", lambda self, planned: 99)
    monkeypatch.setattr("offload.control.state_plan.state_overlap", as_wide_as_can_be)
    loop = planned(Heavy, "64MiB")(True, tmp_path)
    loop.train()
    loop.optimizer.state.engine.store.defer_copy_outs(True)
    loop.step(loops.STEPS)
    assert present_bytes(loop) > 2 * mover.BEHIND_BYTES
    loop.model.eval()
    loop.loss()
    assert present_bytes(loop) <= mover.BEHIND_BYTES + SLACK
    loop.model.train()
    loop.step(loops.STEPS)
    disable(loop)


@pytest.mark.parametrize("in_threads", [False, True])
def test_another_model_finds_little_state_in_memory(in_threads, tmp_path, wide_overlap):
    """Two models step in turn, in one thread or each in its own."""
    plain = loops.Loop(False, tmp_path).train()
    one, other = (planned(loops.Loop, "64MiB")(True, tmp_path) for _ in range(2))
    found = []

    def look(*_):
        if isinstance(one.optimizer.state, StreamedState):
            found.append(present_bytes(one))

    if in_threads:
        trained = []
        threads = [threading.Thread(target=lambda loop=loop: trained.append(loop.train())) for loop in (one, other)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(trained) == 2
        for each in trained:
            assert_equal(each, plain)
    else:
        other.model.register_forward_hook(look)
        for number in range(loops.STEPS):
            for loop in (one, other):
                loop.step(number)
                if number > 8:
                    loop.optimizer.state.engine.store.defer_copy_outs(True)
        assert max(found[-5:]) <= mover.BEHIND_BYTES + SLACK
        for loop in (one, other):
            assert all(map(torch.equal, loop.model.parameters(), plain[0]))
    for loop in (one, other):
        disable(loop)
