"""The trial step measures how long nodes take and how fast copies are, and the next plan is made with these figures."""

import time

import pytest
import torch
from torch import nn
from trial_rig import SLOW, SMALLEST, begun_trials, make, train

import offload
from offload.control.limits import LIMITS
from offload.control.planned_step import PlannedStep
from offload.plan.trace import Node, Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile
from offload.runtime.counters import Counts
from offload.runtime.executor import Measured, Stopwatch
from offload.runtime.schedule import StepOrder


@pytest.fixture
def trials(monkeypatch):
    return begun_trials(monkeypatch)


class Delay(nn.Module):
    """Returns its input; takes `seconds` in forward and in backward if this is the first step."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.steps = seconds, 0

    def forward(self, x):
        self.steps += 1
        seconds = self.seconds if self.steps == 1 else 0.0
        time.sleep(seconds)
        y = x.exp()
        y.register_hook(lambda gradient: time.sleep(seconds))
        return y + x.mean(0).exp()  # what the second `exp` saves is too small to be swapped


@pytest.mark.parametrize("refused", [False, True])
def test_what_took_long_in_the_first_step_only_is_not_planned_with(trials, tmp_path, refused):
    """Also if no tensor can be recomputed."""
    layers = [*make()]
    model = nn.Sequential(*layers[:6], Delay(0.3), *layers[6:])
    trials.about = {"refused": dict.fromkeys(range(100), "its bytes came out differently")} if refused else {}
    with offload.enable(model, max_slowdown=0.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 1)
        profiled = handle._controller.latest().profile.trace.nodes
        train(model, 2)
        assert len(trials) == 1
        planned = handle.plan.trace.nodes
        measured = trials[0].measured(len(planned)).node_seconds
    assert sum(node.seconds for node in profiled) > 0.6
    assert sum(node.seconds for node in planned) < sum(node.seconds for node in profiled) - 0.3
    assert all(node.seconds > 0 for node in planned)
    assert all(measured), "every node of the trial step has begun"
    assert all(new.seconds <= old.seconds for new, old in zip(planned, profiled, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_the_plan_after_the_trial_assumes_the_speed_of_the_copies_so_far(trials, tmp_path, monkeypatch, sampled):
    """If they have taken long enough."""
    monkeypatch.setattr("offload.control.own_copies._SAMPLE_SECONDS", 0.0 if sampled else 1e9)
    model = make()
    with offload.enable(model, max_slowdown=1.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 3)
        link = handle.plan.link
    assert (link.out_bandwidth != SLOW.out_bandwidth, link.in_bandwidth != SLOW.in_bandwidth) == (sampled, sampled)


def test_a_node_of_several_unpacks_lasts_without_their_hooks(trials, tmp_path):
    trials.about = {"unpack_seconds": 0.01}
    model = make()
    with offload.enable(model, max_slowdown=0.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 2)
        order = handle._controller.latest().profile.order
        measured = trials[0].measured(order.node_count)
    assert len(order.uses) > len(order.backward_nodes)
    assert measured.stall_seconds >= 0.01 * len(order.uses)


def train_twice(model, x):
    """A step with two backward passes over its graph."""
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("passes", ["before", "in the trial"])
def test_a_second_pass_changes_no_duration(trials, tmp_path, passes):
    """Before: of the profiled step, after its profile has been read. The recorded order has more nodes then."""
    trials.about = {"unpack_seconds": 0.01}
    model, x = make(), torch.randn(512, 64)
    with offload.enable(model, max_slowdown=0.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        handle.report()
        if passes == "before":
            loss.backward(retain_graph=True)
        del loss
        train_twice(model, x)
        train(model, 1)
        assert len(trials) == 1
        planned = handle._controller.latest()
        nodes = planned.profile.trace.nodes
        measured = trials[0].measured(len(nodes)).node_seconds
    assert planned.recipes is not None
    assert all(measured), "pauses of the second pass belong to no node of the first"


def test_reading_what_autograd_saves_begins_no_node(trials, tmp_path):
    class Reading(nn.Module):
        def forward(self, x):
            y = x.exp()
            assert y.grad_fn._saved_result.shape == y.shape
            return y

    layers = [*make()]
    model = nn.Sequential(*layers[:6], Reading(), *layers[6:])
    with offload.enable(model, max_slowdown=0.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 3)
        assert len(trials) == 1
        assert all(trials[0].measured(len(handle.plan.trace.nodes)).node_seconds)


class Trial:
    """A trial that has ended."""

    finished = True

    def recipes(self):
        return {}

    refusals = recipes

    def measured(self, node_count):
        return Measured((0.0,) * node_count, (0.5,) * node_count, {}, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("compiled", [set(), {1}])
def test_the_durations_of_a_trial_that_runs_submodules_twice_do_not_count(compiled):
    nodes = (Node("a", 1.0, False), Node("b", 1.0, True))
    order = StepOrder(node_count=2, compiled_nodes=compiled)
    profile = Profile(order, Trace(nodes, (0,) * 2, ()), {}, (0,) * 2, HeldBytes(0, 0), knows_temporaries=True)
    planned = PlannedStep(LIMITS, profile, SLOW, HeldBytes(0, 0))
    assert not planned.read_trial(Counts(), cheap=False)
    planned.trial = Trial()
    assert planned.read_trial(Counts(), cheap=False)
    assert [node.seconds for node in planned.trace().nodes] == ([1.0, 1.0] if compiled else [0.5, 0.5])


def test_a_trial_is_not_over_before_the_device_has_ended_its_backward(trials, tmp_path, monkeypatch):
    """If the host has."""
    model = make()
    with offload.enable(model, max_slowdown=0.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 2)
        assert len(trials) == 1
        with monkeypatch.context() as patch:
            patch.setattr(Stopwatch, "measured", lambda stopwatch, node_count: None)
            train(model, 1)
            assert handle._controller.latest().recipes is None
        train(model, 1)
        assert handle._controller.latest().recipes is not None


def test_a_node_that_did_not_begin_takes_as_long_as_in_the_recorded_step():
    nodes = tuple(Node(name, seconds, False) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    profile = Profile(StepOrder(), Trace(nodes, (0,) * 3, ()), {}, (0,) * 3, HeldBytes(0, 0), knows_temporaries=True)
    shorter = profile.with_shorter_nodes([2.0, 1.0, 0.0]).trace.nodes
    assert [node.seconds for node in shorter] == [1.0, 1.0, 3.0]
