"""What a session does inside another model's step counts neither as this step's time nor as its memory."""

import pkgutil

import pytest
import torch
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.plan import Link
from offload.profiling import calibration
from offload.profiling.link_measurement import LinkRates
from offload.runtime.disturbance import disturb, disturbances

MEASUREMENT_BYTES = 64 << 20
STEPS = 6
KNOBS = {"min_tensor_bytes": "4KiB"}


@pytest.fixture(autouse=True)
def measurement(monkeypatch, tmp_path):
    """A measurement of copies that takes no time, and the memory of a real one."""

    def measure(*_: object) -> LinkRates:
        torch.zeros(MEASUREMENT_BYTES // 4)
        return LinkRates(2e9, 2e9, 2e9, 2e9, 2e9, 2e9, 20e-6, 0.0, 1.0)

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make(seed, outputs=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


def train(model, steps=STEPS, within=lambda _: None):
    """Train a model alone, and call `within` between forward and backward of each step."""
    for number in range(steps):
        loss = model(torch.ones(128, 64)).square().mean()
        within(number)
        loss.backward()


def train_both(actor, critic, steps=STEPS):
    """Train a critic, and an actor whose step runs the critic: everything that a step computes."""
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, actor)]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        x = torch.randn(512, 64, generator=generator)
        for number, optimizer in enumerate(optimizers):
            critic.requires_grad_(number == 0)
            loss = critic(actor(x) if number else x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    return [*found, *actor.parameters(), *critic.parameters()]


def test_a_profile_in_which_another_session_measures_and_plans_is_not_used():
    expected = train_both(make(0), make(1, outputs=1))
    actor, critic = make(0), make(1, outputs=1)
    with offload.enable(actor, **KNOBS) as first, offload.enable(critic, **KNOBS) as second:
        assert all(map(torch.equal, train_both(actor, critic), expected))
        assert first.report().profiled_steps == 2
        for handle in (first, second):
            assert 0 < handle.plan.unswapped_peak_bytes < MEASUREMENT_BYTES // 4


def test_profiles_that_are_disturbed_are_few():
    model = make(0)
    with offload.enable(model, **KNOBS) as handle:
        train(model, within=lambda _: disturb())
        assert handle.report().profiled_steps == LIMITS.incomplete_profiles
        assert handle.plan is not None


@pytest.mark.parametrize("knobs", [{"memory_limit": "1GiB"}, {"n_tensors": -1, "lb": 2}], ids=str)
def test_a_measured_step_that_is_disturbed_does_not_count(knobs):
    def measured(within):
        model = make(0)
        with offload.enable(model, **KNOBS, **knobs) as handle:
            train(model, steps=4, within=within)
            handle.report()  # reads what was measured last
            controller = handle._on_device.controller
            return len(controller.main.step_seconds), handle.report().unmeasured_steps

    assert measured(lambda _: None) == (3, 0)
    assert measured(lambda number: disturb() if number == 1 else None) == (2, 1)


def test_what_happens_between_steps_disturbs_none():
    model = make(0)
    with offload.enable(model, **KNOBS, memory_limit="1GiB") as handle:
        for _ in range(STEPS):
            train(model, steps=1)
            disturb()
        controller = handle._on_device.controller
        assert handle.report().profiled_steps == 1
        assert len(controller.main.step_seconds) == LIMITS.measurements_before_judging


@pytest.mark.parametrize(
    "name", ["handle.measure_link", "control.next_plan.wanted_plan", "control.trials.Trials._enter"]
)
def test_each_kind_of_work_is_noted(name, monkeypatch):
    """A measurement of copies, a plan, and a trial step."""
    work, noted = pkgutil.resolve_name(f"offload.{name}"), []

    def watched(*args, **keywords):
        before = disturbances()
        result = work(*args, **keywords)
        noted.append(disturbances() - before)
        return result

    monkeypatch.setattr(f"offload.{name}", watched)
    link = Link(1e6, 1e6)  # swapping takes longer than computing, also on a loaded machine: a trial step follows
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, measured: link)
    model = make(0)
    with offload.enable(model, **KNOBS, preset="smallest"):
        train(model, steps=3)
    assert noted
    assert set(noted) == {1}


def test_reading_a_profile_is_noted():
    model = make(0)
    with offload.enable(model, **KNOBS) as handle:
        train(model, steps=1)
        handle._controller._measure_link = lambda _: Link(1e9, 1e9)  # measuring copies is noted too
        before = disturbances()
        handle.report()
        assert disturbances() == before + 1
