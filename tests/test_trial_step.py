"""The trial step: when it runs, what the next plan makes of it, and what a user is told; its recipes are given here."""

import pytest
import torch
from trial_rig import FAST, SMALLEST, begun_trials, make, train

import offload
from offload.control.trial import recipes_of
from offload.plan.trace import Recompute
from offload.recomputation.measured import MeasuredRecipe


@pytest.fixture
def trials(monkeypatch):
    """Plans assume the given link, whatever the speed of the copies was."""
    monkeypatch.setattr("offload.control.own_copies.OwnCopies.link", lambda copies, link: link)
    return begun_trials(monkeypatch)


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


def test_nothing_is_tried_where_swapping_hides_everything(trials, tmp_path):
    trials.link = FAST
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


def test_a_plan_of_least_memory_is_tried_too(trials, tmp_path):
    """Its steps may take longer than `max_slowdown` allows, and then other plans follow."""
    model = make()
    with offload.enable(model, max_slowdown=1e9, min_tensor_bytes=SMALLEST, spill_dir=tmp_path) as handle:
        train(model, 3)
        assert len(trials) == 1
        assert handle.report().trial_steps == 1


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
        *_, signature = handle._controller.states
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
