"""The trial step: when it runs, what the next plan makes of it, and what a user is told; its recipes are given here."""

import time

import pytest
import torch
from torch import nn

import offload
from offload.control.trial import TimedTrial, recipes_of
from offload.plan import Link
from offload.plan.trace import Node, Recompute, Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile
from offload.recomputation.measured import MeasuredRecipe
from offload.runtime.schedule import StepOrder

FAST, SLOW = Link(1e12, 1e12, 0.0), Link(50e6, 50e6, 0.0)
SMALLEST = "4KiB"


class KnownTrial(TimedTrial):
    """Stands in for a trial: claims a recipe for every entry but some."""

    def __init__(
        self, engine, order, base_bytes, limit_bytes,
        seconds=1e-6, heavy=(), refused=None, differs=False, unpack_seconds=0.0,
    ):  # fmt: skip
        super().__init__(engine, order, base_bytes, limit_bytes)
        self.unpack_seconds = unpack_seconds
        self.order, self.limit_bytes = order, limit_bytes
        self.seconds, self.heavy, self.refused, self.differs = seconds, heavy, refused or {}, differs

    def unpacking(self, pack_index):
        super().unpacking(pack_index)
        time.sleep(self.unpack_seconds)

    @property
    def is_as_recorded(self):
        return not self.differs and super().is_as_recorded

    def recipes(self):
        return {
            index: MeasuredRecipe(self.seconds, frozenset(), ("aten.gelu",), index in self.heavy)
            for index in self.order.entries
            if index not in self.refused
        }

    def refusals(self):
        return self.refused


@pytest.fixture
def trials(monkeypatch):
    """The trials that have begun; `trials.about` is what the next ones are given."""
    begun = Begun()
    monkeypatch.setattr("offload.handle.make_trial", begun.make)
    monkeypatch.setattr("offload.handle.measure_link", lambda *_: begun.link)
    return begun


class Begun(list):
    def __init__(self):
        self.about, self.link, self.answer = {}, SLOW, None

    def make(self, engine, order, base_bytes, limit_bytes):
        if self.answer is not None:
            return self.answer
        self.append(KnownTrial(engine, order, base_bytes, limit_bytes, **self.about))
        return self[-1]


def make():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])


def train(model, steps, rows=512):
    results = []
    for number in range(steps):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        model(x).square().mean().backward()
        results += [parameter.grad.clone() for parameter in model.parameters()]
    return results


def peak_of_plain_steps():
    model = make()
    with offload.enable(model, max_slowdown=0, min_tensor_bytes=SMALLEST, recompute=False) as handle:
        train(model, 2)
        return handle.plan.unswapped_peak_bytes


def test_a_plan_that_waits_is_followed_by_one_trial_and_a_joint_plan(trials, tmp_path):
    expected = train(make(), 6)
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        results = train(model, 2)
        alone = handle.plan
        assert alone.swaps
        assert alone.swap_only
        assert len(trials) == 1, "the second step is the trial"
        assert trials[0].limit_bytes == limit
        results += train(model, 6)[len(results) :]
        plan = handle.plan
        assert plan.recomputes
        assert plan.expected_seconds < alone.expected_seconds
        assert plan.peak_bytes <= limit
        assert len(trials) == 1
        report = handle.report()
    assert all(map(torch.equal, results, expected))
    assert report.trial_steps == 1
    assert [record.is_trial for record in report.steps_measured][:3] == [False, True, False]
    assert report.verdict.tensors_recomputed == len(plan.recomputes)
    assert f"{len(plan.recomputes)} recomputed" in str(report.verdict)
    assert dict(report.rows())["slow profiling steps"].startswith("1; trial steps of recomputation: 1;")


def test_nothing_is_tried_where_swapping_hides_everything(trials, tmp_path, monkeypatch):
    trials.link = FAST
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, link: link)
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 2)
        if handle.plan.expected_seconds <= 1.01 * handle.plan.compute_seconds:
            assert not trials


def test_a_trial_whose_recipes_cost_more_than_swapping_changes_nothing(trials, tmp_path):
    trials.about = {"seconds": 10.0}
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 5)
        assert len(trials) == 1
        assert handle.plan.swaps
        assert not handle.plan.recomputes


@pytest.mark.parametrize(("recompute", "count"), [(False, 0), ("cheap", 1), ("auto", 1)])
def test_the_argument_decides(trials, tmp_path, recompute, count):
    trials.about = {"heavy": tuple(range(100))}
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(
        model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path, recompute=recompute
    ) as handle:
        train(model, 4)
        assert len(trials) == count
        assert bool(handle.plan.recomputes) == (recompute == "auto")
        if recompute == "cheap":
            assert 'recompute="cheap"' in handle.plan.explain()


def test_memory_within_a_slowdown_is_lower_with_recipes(trials, tmp_path):
    peaks = {}
    for recompute in (False, "auto"):
        model = make()
        with offload.enable(
            model, max_slowdown=1.0, min_tensor_bytes=SMALLEST, spill_dir=tmp_path, recompute=recompute
        ) as handle:
            train(model, 4)
            peaks[recompute] = handle.plan.peak_bytes
    assert peaks["auto"] < peaks[False]
    assert len(trials) == 1


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
        measured = trials[0].measured().node_seconds
    assert sum(node.seconds for node in profiled) > 0.6 > 0.3 > sum(node.seconds for node in planned)
    assert all(node.seconds > 0 for node in planned)
    assert all(measured), "every node of the trial step has begun"
    assert all(new.seconds <= old.seconds for new, old in zip(planned, profiled, strict=True))


def test_a_plan_of_least_memory_is_tried_too(trials, tmp_path):
    """Its steps may take longer than `max_slowdown` allows, and then other plans follow."""
    model = make()
    with offload.enable(model, max_slowdown=1e9, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 3)
        assert len(trials) == 1
        assert handle.report().trial_steps == 1


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
        order, measured = handle._controller.latest().profile.order, trials[0].measured()
    assert len(order.uses) > len(order.backward_nodes)
    assert measured.stall_seconds >= 0.01 * len(order.uses)


def test_a_node_that_did_not_begin_takes_as_long_as_in_the_recorded_step():
    nodes = tuple(Node(name, seconds, False) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    profile = Profile(StepOrder(), Trace(nodes, (0,) * 3, ()), {}, (0,) * 3, HeldBytes(0, 0), knows_temporaries=True)
    shorter = profile.with_shorter_nodes([2.0, 1.0, 0.0]).trace.nodes
    assert [node.seconds for node in shorter] == [1.0, 1.0, 3.0]


def test_the_reason_is_told_where_no_trial_can_run(trials, tmp_path):
    trials.answer = "the model is compiled"
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 4)
        assert not handle.plan.recomputes
        assert "nothing is recomputed: the model is compiled" in handle.report().notes
        assert handle.report().trial_steps == 0


def test_a_trial_without_a_backward_proves_as_much(trials, tmp_path):
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 1)
        model(torch.randn(512, 64))  # its graph is dropped
        train(model, 2)
        assert len(trials) == 1
        assert handle.plan.recomputes


def test_a_trial_that_takes_another_branch_is_recorded_again(trials, tmp_path):
    trials.about = {"differs": True}
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 2)
        trials.about = {}
        train(model, 4)
        assert handle.report().profiled_steps == 2
        assert len(trials) == 2
        assert handle.plan.recomputes


@pytest.mark.long
def test_another_shape_and_a_new_recording_are_tried_on_their_own(trials, tmp_path):
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 4)
        train(model, 4, rows=500)
        assert len(trials) == 2
        train(model, 2)
        assert len(trials) == 2
        *_, signature = handle._controller._states
        handle._controller.forget(signature)
        train(model, 3)
        assert len(trials) == 3


def test_explain_says_of_every_tensor_what_becomes_of_it_and_why(trials, tmp_path):
    limit = int(0.6 * peak_of_plain_steps())
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 1)
        indices = sorted(index for rows in handle._controller.latest().profile.members.values() for index in rows)
        trials.about = {"refused": dict.fromkeys(indices[::2], "its bytes came out differently")}
        train(model, 3)
        plan, words = handle.plan, handle.plan.explain()
    for tensor in plan.trace.tensors:
        assert f"(tensor {tensor.id})" in words
    assert "recomputed at node" in words
    assert "cannot be recomputed: its bytes came out differently" in words


# -- from entries to tensors ------------------------------------------------------------------------------------------


class Found:
    def __init__(self, recipes, refusals=None):
        self._recipes, self._refusals = recipes, refusals or {}

    def recipes(self):
        return self._recipes

    def refusals(self):
        return self._refusals


def recipe(seconds, *sources, is_heavy=False, workspace_bytes=0):
    return MeasuredRecipe(seconds, frozenset(sources), ("aten.mul",), is_heavy, workspace_bytes=workspace_bytes)


def test_a_tensor_has_a_recipe_if_all_of_its_entries_have_one():
    found = Found({0: recipe(1.0), 1: recipe(2.0, 0, 9, workspace_bytes=5), 3: recipe(1.0)}, {2: "it is random"})
    recipes = recipes_of(found, {0: (0,), 1: (1, 3), 2: (2, 4), 5: (5,)}, cheap=False)
    assert recipes.recompute == {0: Recompute(1.0, ()), 1: Recompute(3.0, (0,), 5)}
    assert recipes.refusals == {2: "it is random", 5: "the trial step did not record how it is computed"}


def test_entries_that_are_made_of_each_others_tensors_make_no_circle():
    found = Found({0: recipe(1.0), 1: recipe(1.0, 0), 2: recipe(1.0, 1)})
    recipes = recipes_of(found, {0: (0, 2), 1: (1,)}, cheap=False)
    assert len(recipes.recompute) == 1
    assert list(recipes.refusals.values()) == ["its recipe depends on itself"]


def test_cheap_leaves_heavy_recipes_out():
    found = Found({0: recipe(1.0, is_heavy=True), 1: recipe(1.0)})
    recipes = recipes_of(found, {0: (0,), 1: (1,)}, cheap=True)
    assert list(recipes.recompute) == [1]
    assert 'recompute="cheap"' in recipes.refusals[0]
