"""Updates in virtual time: state that is copied in both passes costs less time, and no more memory."""

from itertools import pairwise

import pytest
import torch
from test_virtual_steps import own_link
from torch import nn
from twin import virtual_time
from twin.virtual_time import Figures

import offload
from offload.control.limits import Limits
from offload.control.phase import Phase
from offload.optimizer_state import mover

__all__ = ["own_link"]  # a fixture

CARD = Figures(1e12, 1e11, out_bytes_per_second=2e9, in_bytes_per_second=2e9, kernel_seconds=2e-6)
WIDTH, LAYERS, ROWS = 256, 8, 2048


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    for name in ("CHUNK_BYTES", "AHEAD_BYTES", "BEHIND_BYTES"):
        monkeypatch.setattr(mover, name, 512 << 10)


class Training:
    """A few steps of AdamW. `cycles`: seconds of the last cycles; `peak_bytes`: allocated after the first steps."""

    def __init__(self, steps=14, skipped=(), again=(), parts=1, **knobs):
        torch.manual_seed(0)
        layers = (each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        model = nn.Sequential(*layers).to("sim")
        parameters = list(model.parameters())
        size = len(parameters) // parts
        optimizers = [
            torch.optim.AdamW(parameters[n * size : (n + 1) * size], lr=0.01, foreach=False) for n in range(parts)
        ]
        asked = {"optimizer": optimizers, "optimizer_state": True, "min_tensor_bytes": 1 << 16, "recompute": False}
        handle = offload.enable(model, **{**asked, **knobs}) if knobs else None
        x = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(1)).to("sim")
        ends, peaks = [], []
        self.plans = []
        for number in range(steps):
            torch.sim.reset_peak_memory_stats()
            model.zero_grad()
            loss = model(x).square().mean()
            if number in again:
                loss.backward(retain_graph=True)
            loss.backward()
            for optimizer in reversed(optimizers) if number not in skipped else ():
                optimizer.step()
            if handle is not None:
                self.plans.append(handle.plan)
            torch.sim.current_stream().synchronize()
            ends.append(virtual_time.now())
            peaks.append(torch.sim.max_memory_allocated())
        self.cycles = [end - begin for begin, end in pairwise(ends)][-3:]
        self.peak_bytes = max(peaks[3:])
        if handle is not None:
            self.plan = handle.plan
            known = handle._controller.latest().overlap
            self.overlap = known.overlap if known is not None else None
            self.phases = {state.phase for state in handle._controller.states.values()}
            self.allowed = handle._states._behind.allowed
            self.counts, *_ = handle.report().optimizer_state
            handle.disable()
        states = [state for each in optimizers for state in each.state_dict()["state"].values()]
        state = [value.cpu() for each in states for value in each.values()]
        self.found = [*(parameter.detach().cpu() for parameter in model.parameters()), *state]


@pytest.mark.parametrize("share", [0.93, 0.91])
def test_state_that_is_copied_in_both_passes_costs_less(share, monkeypatch):
    with virtual_time.on(CARD):
        plain = Training()
        limit = int(share * plain.peak_bytes)
        training = Training(memory_limit=limit)
        monkeypatch.setattr("offload.control.state_plan.state_overlap", lambda *_, **__: None)
        fixed = Training(memory_limit=limit)
    assert all(map(torch.equal, training.found, plain.found))
    assert all(map(torch.equal, fixed.found, plain.found))
    assert training.counts.early_bytes > 0
    assert "of it in backward" in str(training.counts)
    assert training.peak_bytes <= limit
    predicted = training.overlap.timing.seconds, training.overlap.baseline_timing.seconds
    assert (max(training.cycles), max(fixed.cycles)) == pytest.approx(predicted, rel=0.06)
    assert max(training.cycles) < 0.96 * min(fixed.cycles)


def test_without_a_limit_hooks_stay_for_it(monkeypatch):
    """No tensor is swapped, because too little memory could be saved; state is copied in both passes nevertheless."""
    monkeypatch.setattr(Limits, "is_worth_hooks", lambda *_: False)
    with virtual_time.on(CARD):
        plain = Training()
        training = Training(max_slowdown=0.05)
    assert all(map(torch.equal, training.found, plain.found))
    assert not training.plan.swaps
    assert training.counts.early_bytes > 0
    assert training.peak_bytes < plain.peak_bytes
    assert max(training.cycles) < 1.06 * max(plain.cycles)


@pytest.mark.parametrize(
    "how", [{"skipped": (9, 11)}, {"again": (9, 11)}, {"parts": 2}], ids=lambda how: next(iter(how))
)
def test_steps_of_other_kinds_need_no_more_memory(how, monkeypatch):
    """An update does not come, a graph is used twice, or the last optimizer steps first.

    State that has been read ahead is not counted as in use: the next step would be planned again, as if the program
    needed more memory.
    """
    with virtual_time.on(CARD):
        plain = Training(**how)
        limit = int(0.93 * plain.peak_bytes)
        training = Training(**how, memory_limit=limit)
        monkeypatch.setattr("offload.control.state_plan.state_overlap", lambda *_, **__: None)
        fixed = Training(**how, memory_limit=limit)
    assert all(map(torch.equal, training.found, plain.found))
    assert training.counts.early_bytes > 0
    assert training.peak_bytes <= max(limit, fixed.peak_bytes)
    assert all(plan is training.plan for plan in training.plans[8:])


def test_without_a_limit_a_step_after_a_skipped_update_needs_no_more_memory(monkeypatch):
    monkeypatch.setattr(Limits, "is_worth_hooks", lambda *_: False)
    with virtual_time.on(CARD):
        all_updates = Training(max_slowdown=0.05)
        training = Training(max_slowdown=0.05, skipped=(9, 11))
    assert training.counts.early_bytes > 0
    assert training.peak_bytes == all_updates.peak_bytes


def test_steps_whose_hooks_are_removed_have_no_overlap(monkeypatch):
    """The first update comes after the hooks were removed, so nobody would lower what is written in forward."""
    monkeypatch.setattr(Limits, "is_worth_hooks", lambda *_: False)
    with virtual_time.on(CARD):
        plain = Training(skipped=range(8))
        training = Training(skipped=range(8), max_slowdown=0.05)
    assert all(map(torch.equal, training.found, plain.found))
    assert training.phases == {Phase.UNHOOKED}
    assert training.allowed is None
