"""With `memory_limit`, steps are profiled again now and then: a loss outside of the model may need more than it did."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from live_bytes import Peak
from planned_rig import assert_equal, enabled, known_link  # noqa: F401
from torch import nn

from offload.control import repeated_profile
from offload.control.limits import LIMITS
from offload.control.phase import Phase, SignatureState

SOON = replace(LIMITS, recheck_steps=16, recheck_steps_max=64)
BEGINS = 12  # the step in which the loss begins to need more
STEPS = 40


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
                loss = loss + torch.cdist(y, y).mean()
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
    limit_bytes = 11 << 18
    expected, _ = train(make_model())
    model = make_model()
    with enabled(model, spill_dir=tmp_path, memory_limit=limit_bytes) as handle, caplog.at_level(logging.INFO, "offload"):
        found, peaks = train(model, handle, watched=(BEGINS + 1, STEPS - 1))
        profiled = handle._enabled.sessions[0].counts.profiled_steps
    assert_equal(found, expected)
    assert peaks[BEGINS + 1] > 1.02 * limit_bytes
    assert (peaks[STEPS - 1] > 1.02 * limit_bytes) == is_left_out
    assert ("needs more memory than in the profiled step" in caplog.text) != is_left_out
    assert profiled == (1 if is_left_out else 3)


@pytest.mark.parametrize(
    ("steps", "is_due"),
    [(0, False), (31, False), (32, True), (33, False), (64, False), (96, True), (160, False), (224, True), (480, True),
     (992, True), (1504, False), (2016, True), (3040, True), (3041, False)],
)  # fmt: skip
def test_steps_that_are_profiled_again(steps, is_due):
    """Ever more seldom, and never the steps in which plans are compared with reference steps."""
    state, planned = SignatureState(Phase.STEADY), SimpleNamespace(steps=steps)
    limited, unlimited = SimpleNamespace(memory_limit=1), SimpleNamespace(memory_limit=None)
    assert repeated_profile.is_due(state, planned, limited, LIMITS) == is_due
    assert not repeated_profile.is_due(state, planned, unlimited, LIMITS)
    assert not repeated_profile.is_due(SignatureState(Phase.MEASURING), planned, limited, LIMITS)
    assert not repeated_profile.is_due(SignatureState(Phase.STEADY, profiler=object()), planned, limited, LIMITS)


@pytest.mark.parametrize(
    ("found", "knows_temporaries", "needs_more"),
    [
        ((100, 200, 100), True, False),
        ((109, 209, 109), True, False),  # 1 % of the limit
        ((100, 211, 100), True, True),
        ((111, 100, 100), True, True),
        ((50, 50, 50), True, False),
        ((100, 211, 100), False, False),
        ((100, 100, 100, 211), True, True),
        ((100, 100, 100, 209), True, False),
    ],
)
def test_what_counts_as_more(found, knows_temporaries, needs_more):
    planned = SimpleNamespace(trace=lambda: SimpleNamespace(base_bytes=(100, 200, 100)))
    profile = SimpleNamespace(knows_temporaries=knows_temporaries, trace=SimpleNamespace(base_bytes=found))
    options = SimpleNamespace(memory_limit=1000)
    assert repeated_profile.needs_more(planned, profile, options, LIMITS) == needs_more


def test_a_profile_that_needs_no_more_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("offload.handle.LIMITS", SOON)
    model = make_model()
    expected, _ = train(make_model(), needs_more=False)
    with enabled(model, spill_dir=tmp_path, memory_limit=11 << 18) as handle:
        found, peaks = train(model, handle, needs_more=False, watched=(STEPS - 1,))
        counts = handle._enabled.sessions[0].counts
        planned = handle._enabled.sessions[0].controller.main
    assert_equal(found, expected)
    assert counts.profiled_steps == 3
    assert planned.steps == STEPS - 1
    assert peaks[STEPS - 1] <= 1.02 * (11 << 18)


def test_a_backward_pass_that_ends_later(monkeypatch, tmp_path):
    """Two forward passes before both backward passes, also where a step is profiled again."""
    monkeypatch.setattr("offload.handle.LIMITS", SOON)

    def run(model):
        found = []
        for number in range(20):
            model.zero_grad()
            xs = [torch.randn(256, 128, generator=torch.Generator().manual_seed(2 * number + k)) for k in range(2)]
            losses = [model(x).square().mean() for x in xs]
            for loss in losses:
                loss.backward()
            found.extend(each.grad.clone() for each in model.parameters())
        return found

    expected = run(make_model())
    model = make_model()
    with enabled(model, spill_dir=tmp_path, memory_limit=16 << 20) as handle:
        found = run(model)
        profiled = handle._enabled.sessions[0].counts.profiled_steps
    assert_equal(found, expected)
    assert profiled > 1
