"""With `memory_limit`, steps are profiled again now and then: a loss outside of the model may need more than it did."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import plant as machines
import pytest
import torch
from live_bytes import Peak
from planned_rig import assert_equal, enabled, known_link  # noqa: F401
from torch import nn

from offload.control import repeated_profile
from offload.control.limits import LIMITS
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.plan import Link, Swap, make_plan
from offload.plan.trace import Node, SavedTensor, Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile

SOON = replace(LIMITS, recheck_steps=16, recheck_steps_max=64, replans=0)
BEGINS = 12  # the step in which the loss begins to need more
STEPS = 40
LIMIT_BYTES = 3 << 20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())])


def train(model, handle=None, *, needs_more=True, watched=()):
    """Losses and gradients of all steps; the peaks of the watched ones."""
    found, peaks = [], {}
    for number in range(STEPS):
        x = torch.randn(512, 128, generator=torch.Generator().manual_seed(number))
        peak = Peak()
        model.zero_grad()

        def step(x=x, number=number):
            y = model(x)
            loss = y.square().mean()
            if needs_more and number >= BEGINS:
                loss = loss + torch.cdist(y[:256], y[:256]).mean()
            loss.backward()
            found.append(loss.detach())

        if number in watched:
            with peak.watch():
                step()
            peaks[number] = peak.nbytes
        else:
            step()
        found.extend(each.grad.clone() for each in model.parameters())
    return found, peaks


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_loss_that_begins_to_need_more_is_noticed(is_left_out, monkeypatch, tmp_path, caplog):
    """Bits are those of plain training, and the limit holds again. Left out: no step is profiled again."""
    monkeypatch.setattr("offload.handle.LIMITS", SOON)
    if is_left_out:
        monkeypatch.setattr(repeated_profile, "is_due", lambda *_: False)
    expected, _ = train(make_model())
    model = make_model()
    with (
        enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=LIMIT_BYTES) as handle,
        caplog.at_level(logging.INFO, "offload"),
    ):
        found, peaks = train(model, handle, watched=(BEGINS - 1, BEGINS + 1, STEPS - 1))
        profiled = handle._counts.profiled_steps
    assert_equal(found, expected)
    kept = 1.01 * peaks[BEGINS - 1]
    assert peaks[BEGINS + 1] > 1.2 * kept
    assert (peaks[STEPS - 1] > kept) == is_left_out
    assert ("needs more memory than in the profiled step" in caplog.text) != is_left_out
    assert profiled == (1 if is_left_out else 3)


def due_steps(count, limits=LIMITS, **given):
    """The steps that are profiled again, where all are steady."""
    state, planned, options = SignatureState(Phase.STEADY), SimpleNamespace(steps=0), SimpleNamespace(memory_limit=1)
    for name, value in given.items():
        setattr(state if name == "phase" else options, name, value)
    found = []
    while planned.steps < count:
        if repeated_profile.is_due(state, planned, options, limits):
            state.profiled_at = planned.steps
            found.append(planned.steps)
        planned.steps += 1
    return found


def test_steps_that_are_profiled_again():
    """Ever more seldom."""
    assert due_steps(3100) == [32, 96, 224, 480, 992, 2016, 3040]
    assert due_steps(3100, memory_limit=None) == []
    assert due_steps(3100, phase=Phase.MEASURING) == []


def profiled(base_bytes, *, knows_temporaries=True, state=0):
    nodes = (Node("a", 1.0, False), Node("b", 1.0, False), Node("c", 1.0, True), Node("d", 1.0, True))
    trace = Trace(nodes, base_bytes, (SavedTensor(1, 500, 0, 0, 0, 3, 3),))
    return Profile(machines.order_of(trace), trace, {1: (1,)}, [0] * 4, HeldBytes(state, 0), knows_temporaries)


SWAPPED = (Swap(1, 1, 3),)


def planned_with(base_bytes, swaps=SWAPPED):
    planned = PlannedStep(LIMITS, profiled(base_bytes), Link(1e9, 1e9), HeldBytes(0, 0))
    planned.plan = make_plan(planned.trace(), planned.link, swaps)
    return planned


KEEPS = ()
CASES = {
    "the same": ((100, 200, 100, 100), {}, False, (100, 200, 100, 100)),
    "noise": ((100, 210, 100, 100), {}, False, (100, 200, 100, 100)),
    "less": ((50, 50, 50, 50), {}, False, (100, 200, 100, 100)),
    "more, within the limit": ((50, 250, 100, 100), {}, False, (100, 250, 100, 100)),
    "too much": ((50, 650, 100, 100), {"swaps": KEEPS}, True, (100, 650, 100, 100)),
    "incomplete": ((50, 650, 100, 100), {"swaps": KEEPS, "knows_temporaries": False}, False, (100, 200, 100, 100)),
    "state": ((150, 250, 150, 150), {"state": 50}, False, (100, 200, 100, 100)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_over(name):
    """From each node that needs more, and not where the optimizer's state explains it."""
    found, given, is_due, base_bytes = CASES[name]
    given = dict(given)
    planned = planned_with((100, 200, 100, 100), given.pop("swaps", SWAPPED))
    assert repeated_profile.take_over(planned, profiled(found, **given), 1100, LIMITS) == is_due
    assert planned.profile.trace.base_bytes == base_bytes


def test_what_no_plan_can_keep_is_a_warning():
    planned = planned_with((100, 200, 100, 100))
    with pytest.warns(UserWarning, match="the least limit that works now is 1.17 KiB"):
        assert not repeated_profile.take_over(planned, profiled((100, 1200, 100, 100)), 1100, LIMITS)
    assert planned.profile.trace.base_bytes == (100, 200, 100, 100)


def test_a_profile_that_needs_no_more_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("offload.handle.LIMITS", SOON)
    model = make_model()
    expected, _ = train(make_model(), needs_more=False)
    with enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=LIMIT_BYTES) as handle:
        found, peaks = train(model, handle, needs_more=False, watched=(BEGINS - 1, STEPS - 1))
        counts = handle._counts
    assert_equal(found, expected)
    assert counts.profiled_steps == 3
    assert peaks[STEPS - 1] <= 1.01 * peaks[BEGINS - 1]


def in_two_parts(model, steps=20):
    """Two forward passes before both backward passes."""
    found = []
    for number in range(steps):
        model.zero_grad()
        xs = [torch.randn(256, 128, generator=torch.Generator().manual_seed(2 * number + k)) for k in range(2)]
        losses = [model(x).square().mean() for x in xs]
        for loss in losses:
            loss.backward()
        found.extend(each.grad.clone() for each in model.parameters())
    return found


def test_a_backward_pass_that_ends_later(monkeypatch, tmp_path, caplog):
    """The memory of a second step counts in no profile, so nothing is planned again."""
    monkeypatch.setattr("offload.handle.LIMITS", SOON)
    expected, model = in_two_parts(make_model()), make_model()
    with enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=2 << 20) as handle:
        caplog.set_level(logging.INFO, "offload")
        found = in_two_parts(model)
        assert handle._counts.profiled_steps > 1
        assert handle.plan.swaps
    assert_equal(found, expected)
    assert "code outside of the model" not in caplog.text


def test_a_step_without_backward_is_profiled_again_later(monkeypatch, tmp_path):
    monkeypatch.setattr("offload.handle.LIMITS", SOON)
    model = make_model()
    with enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=LIMIT_BYTES) as handle:
        for number in range(40):
            loss = model(torch.randn(512, 128)).square().mean()
            if not 8 <= number < 16:
                loss.backward()
            del loss
        state = next(iter(handle._controller._states.values()))
        assert handle._counts.profiled_steps >= 3
    assert state.profiler is None
    assert state.phase is Phase.STEADY
