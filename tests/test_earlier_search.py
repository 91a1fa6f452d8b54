"""A search for a plan begins with what an earlier training of the same step has measured."""

import inspect
import json
import logging
import os
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from math import hypot, inf, nan, sqrt
from statistics import mean
from types import SimpleNamespace

import plant as machines
import pytest
import torch
from fresh_python import run_fresh_python
from test_plan_search import STEPS, machine, slowdown

from offload.control import earlier_search, plan_search
from offload.control.earlier_search import EarlierSearches
from offload.control.limits import LIMITS
from offload.control.phase import Phase
from offload.control.plan_search import PlanSearch
from offload.control.tried_plan import TriedPlan
from offload.plan import make_plan

ALLOWED = 0.05


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where searches are kept in these tests."""
    monkeypatch.delenv("OFFLOAD_SEARCH_ANEW")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offload"


def train(plant, profiled, calibrated, number=0, steps=STEPS, **given):
    """One training on the machine, with noise of its own. Returns the step and how many plans its steps followed."""
    plant.reseed(100 * plant.seed + number)
    plant.steps.clear()
    plant.plans.clear()
    planned, phase = machines.run(plant, profiled, calibrated, steps, **{"max_slowdown": ALLOWED, **given})
    assert phase in (Phase.STEADY, Phase.UNHOOKED)
    return planned, len(plant.plans)


def moves(plan):
    return plan.swaps, plan.recomputes


def test_the_next_training_begins_with_the_plan_that_the_search_ended_with(caplog):
    about = machine(7)
    first, plans = train(*about)
    assert plans > 2
    with caplog.at_level(logging.INFO, "offload"):
        second, plans = train(*about, 1)
    assert "beginning with a plan of an earlier search" in caplog.text
    assert moves(next(iter(about[0].plans.values()))) == moves(second.plan) == moves(first.plan)
    assert plans == 1
    assert slowdown(about[0], second) <= ALLOWED
    judged = second.search.judged(second.plan)
    assert (judged.is_earlier, judged.reference_steps) == (False, LIMITS.judged_steps)


def tried(measured, error, **given):
    plan = SimpleNamespace()
    return TriedPlan(plan, measured, error, 0.05, 8, 1.0, measured - 0.01, **given)


def test_measurements_of_two_trainings_count_by_their_variances():
    found = tried(0.04, nan).combined_with(tried(0.02, 0.01, is_earlier=True), 0.02)
    assert found.measured == pytest.approx(0.024)
    assert found.measured_error == pytest.approx(1 / sqrt(0.02**-2 + 0.01**-2))
    assert found.deviation == 0.05
    assert found.unexplained_seconds == pytest.approx(0.014)
    assert (found.reference_steps, found.is_earlier) == (8, False)


def test_both_measurements_of_a_plan_count(monkeypatch):
    """Also once the first plan of the search has been judged; and only once."""
    about, combined = machine(7, 0.02), []
    combine = TriedPlan.combined_with
    monkeypatch.setattr(TriedPlan, "combined_with", lambda *given: combined.append(combine(*given)) or combined[-1])
    first, _ = train(*about)
    assert not combined
    second, _ = train(*about, 1)
    measured = [each.measured for each in second.search.tried if not each.is_earlier]
    assert combined
    assert measured[0] == combined[-1].measured
    assert first.search.judged(first.plan).measured != measured[0]


def spread_of_peaks(seed):
    about = machine(seed, 0.04)
    peaks = [train(*about, number)[0].plan.peak_bytes for number in range(5)]
    return (max(peaks) - min(peaks)) / mean(peaks)


def test_trainings_of_one_step_end_with_similar_peaks(monkeypatch):
    """Each step takes up to some per cent longer, by chance."""
    spreads = [spread_of_peaks(seed) for seed in range(6)]
    monkeypatch.setenv("OFFLOAD_SEARCH_ANEW", "1")
    assert 2 * sum(spreads) < sum(spread_of_peaks(seed) for seed in range(6))


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_plan_that_is_too_slow_in_this_training_is_rejected(is_left_out, monkeypatch):
    """Copies cost three times as much as before. Left out: the earlier measurement counts all the same."""
    plant, profiled, calibrated = machine(7)
    first, _ = train(plant, profiled, calibrated)
    assert slowdown(plant, first) <= ALLOWED
    plant.link = replace(plant.link, byte_seconds=plant.link.byte_seconds * 3)
    monkeypatch.setattr(plan_search, "standard_error", lambda *_: 0.03)
    if is_left_out:
        judge = changed(PlanSearch.judge, "elif own.measured - error <= max_slowdown:", "else:")
        monkeypatch.setattr(PlanSearch, "judge", judge)
    second, _ = train(plant, profiled, calibrated, 1)
    judged = second.search.judged(first.plan)
    assert (judged.measured == pytest.approx(slowdown(plant, first), abs=0.005)) != is_left_out
    assert slowdown(plant, first) > ALLOWED
    assert is_left_out or moves(second.plan) != moves(first.plan)


def changed(function, text, instead):
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1
    found = {}
    exec(source.replace(text, instead), function.__globals__, found)
    return found[function.__name__]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_no_search_ends_with_a_plan_that_only_an_earlier_training_has_measured(is_left_out, monkeypatch):
    """Left out: such plans count as if they had been measured in this one."""
    unmeasured = 0
    if is_left_out:
        monkeypatch.setattr(PlanSearch, "unmeasured_best", lambda *_: None)
        monkeypatch.setattr(PlanSearch, "best", changed(PlanSearch.best, " and not each.is_earlier", ""))
    for seed in range(6):
        plant, profiled, calibrated = machine(seed, 0.04)
        for number in range(5):
            planned, _ = train(plant, profiled, calibrated, number)
            judged = planned.search.judged(planned.plan)
            unmeasured += judged is not None and judged.is_earlier
    assert (unmeasured > 0) == is_left_out


def test_a_rejected_plan_is_measured_again_if_it_may_save_much(folder):
    about = machine(7, 0.02)
    first, _ = train(*about)
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    wide = {**kept["tried"][kept["plan"]], "swaps": [], "recomputes": None}
    other = max(kept["tried"], key=lambda row: len(row["swaps"]))
    rejected = {**other, "slowdown": 0.045, "error": 0.02}
    path.write_text(json.dumps({**kept, "tried": [rejected, wide], "plan": 1}))
    again, _ = train(*about, 1)
    assert len(again.search.tried) >= 2
    begun_with = next(iter(about[0].plans.values()))
    assert sorted(map(list, begun_with.swaps)) == sorted(other["swaps"])
    assert first.plan.swaps


def test_where_no_plan_kept_the_promise_the_next_search_knows_what_was_tried(caplog):
    plant, profiled, calibrated = machine(7)
    plant.fixed_seconds = 0.2 * plant.compute_seconds
    first, plans = train(plant, profiled, calibrated)
    assert not any(moves(first.plan))
    second, others = train(plant, profiled, calibrated, 1)
    assert others <= plans
    assert not any(moves(second.plan))
    assert second.search.earlier
    plant.fixed_seconds = 0
    third, _ = train(plant, profiled, calibrated, 2)
    assert any(moves(third.plan))
    assert slowdown(plant, third) <= ALLOWED


def test_a_search_that_starts_again_begins_anew(caplog):
    plant, profiled, calibrated = machine(7)
    train(plant, profiled, calibrated)

    def slow_down(number):
        if number == 100:
            plant.link = replace(plant.link, byte_seconds=20 * plant.link.byte_seconds + 1e-10)

    with caplog.at_level(logging.INFO, "offload"):
        planned, _ = train(plant, profiled, calibrated, 1, steps=500, then=slow_down)
    assert "searching again" in caplog.text
    assert caplog.text.count("beginning with a plan of an earlier search") == 1
    assert planned.search.is_anew
    assert slowdown(plant, planned) <= ALLOWED


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "no json {",
        lambda kept: "[]",
        lambda kept: {**kept, "key": {}},
        lambda kept: {"key": kept["key"]},
        lambda kept: {**kept, "tried": 7},
        lambda kept: {**kept, "plan": 99},
        lambda kept: {**kept, "plan": "first"},
        lambda kept: {**kept, "tried": [{}]},
        lambda kept: {**kept, "tried": [{**row, "swaps": [[10**6, 0, 1]]} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "swaps": [[1]]} for row in kept["tried"]]},
        lambda kept: {**kept, "plan": -1},
        lambda kept: {**kept, "tried": [{**row, "swaps": [[inf, 0, 1]]} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "measured_error": -1} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "measured": "fast"} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "measured": float("nan")} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "compute_seconds": 0} for row in kept["tried"]]},
        lambda kept: {**kept, "tried": [{**row, "reference_steps": 0} for row in kept["tried"]]},
    ],
)
def test_what_cannot_be_used_is_left_aside(damage, folder, caplog):
    about = machine(7)
    expected, plans = train(*about)
    [path] = folder.iterdir()
    damaged = damage(json.loads(path.read_text()))
    path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    with caplog.at_level(logging.INFO, "offload"):
        found, others = train(*about)
    assert "the search begins anew" in caplog.text
    assert (moves(found.plan), others) == (moves(expected.plan), plans)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "offload"):
        planned, _ = train(*machine(7))
    assert "so the next one begins anew" in caplog.text
    assert planned.search.is_settled


def test_it_counts_for_a_week(folder):
    about = machine(7)
    _, plans = train(*about)
    [path] = folder.iterdir()
    for days, begins_anew in ((6.9, False), (7.1, True)):
        at = time.time() - 86400 * days
        os.utime(path, (at, at))
        assert (train(*about, 1)[1] == plans) == begins_anew


@pytest.mark.parametrize("of", ["memory_limit", "environment", "other programs"])
def test_what_is_not_kept(of, folder, monkeypatch):
    plant, profiled, calibrated = machine(7)
    given = {}
    if of == "memory_limit":
        given = {"memory_limit": make_plan(plant.trace, plant.link, ()).peak_bytes}
    elif of == "environment":
        monkeypatch.setenv("OFFLOAD_SEARCH_ANEW", "1")
    else:
        monkeypatch.setattr(plan_search.PlanSearch, "is_shared", property(lambda self: True))
    planned, _ = train(plant, profiled, calibrated, **given)
    assert planned.search.tried
    assert not folder.exists()


@pytest.mark.parametrize(
    "of",
    ["max_slowdown", "min_tensor_bytes", "recompute", "threads", "malloc", "torch", "environment", "step", "bytes"],
)
def test_what_makes_it_another_search(of, folder, monkeypatch):
    plant, profiled, calibrated = machine(7)
    train(plant, profiled, calibrated)
    given = {"max_slowdown": {"max_slowdown": 0.04}, "min_tensor_bytes": {"min_tensor_bytes": 2},
             "recompute": {"recompute": "cheap"}}.get(of, {})  # fmt: skip
    if of == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    elif of == "malloc":
        monkeypatch.setattr(earlier_search.allocator, "current", lambda: "another")
    elif of == "torch":
        monkeypatch.setattr(torch, "__version__", "0.1")
    elif of == "environment":
        monkeypatch.setattr(earlier_search, "environment", lambda: {"host": "another"})
    elif of == "step":
        node = profiled.nodes[0]
        profiled = replace(profiled, nodes=(replace(node, name=node.name + "x"), *profiled.nodes[1:]))
    elif of == "bytes":
        tensor = profiled.tensors[0]
        profiled = replace(profiled, tensors=(replace(tensor, bytes=tensor.bytes + 1), *profiled.tensors[1:]))
    train(plant, profiled, calibrated, **given)
    assert len([*folder.iterdir()]) == 2


def test_other_memory_and_other_durations_are_the_same_step(folder):
    plant, profiled, calibrated = machine(7)
    train(plant, profiled, calibrated)
    slower = tuple(replace(node, seconds=2 * node.seconds) for node in profiled.nodes)
    more = tuple(each + 1000 for each in profiled.base_bytes)
    train(plant, replace(profiled, nodes=slower, base_bytes=more), calibrated)
    assert len([*folder.iterdir()]) == 1


def test_what_was_measured_long_ago_counts_less(folder):
    """By 1 percentage point more with each training, as squares; not what this training has measured."""
    about = machine(7)
    options = machines.Options(None, ALLOWED, None, None, 1, (), 0, "")
    searches = EarlierSearches(torch.device("cpu"), options, replace(LIMITS, copies_slow=0.0))
    train(*about)
    errors = []
    for number in range(4):
        found = searches.find(about[1], about[2])
        errors.append(max(each.measured_error for each in found.tried))
        train(*about, number + 1)
    assert errors[0] >= LIMITS.trainings_spread
    assert all(b == pytest.approx(hypot(a, LIMITS.trainings_spread)) for a, b in pairwise(errors))


def test_the_latest_plans_are_kept_and_old_files_deleted(folder, monkeypatch):
    monkeypatch.setattr(earlier_search, "_PLANS_MAX", 2)
    about = machine(7, 0.03)
    first, _ = train(*about)
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    assert len(first.search.tried) > 2
    assert 2 <= len(kept["tried"]) <= 3
    assert kept["tried"][kept["plan"]]["swaps"] == [list(swap) for swap in first.plan.swaps]
    old = path.with_name("search-0000000000000000.json")
    unfinished = path.with_name("search-0000000000000000abc.part")
    other = path.with_name("link-0000000000000000.json")
    for each in (old, unfinished, other):
        each.write_text("{}")
        os.utime(each, (0, 0))
    train(*about, 1)
    assert [each.exists() for each in (old, unfinished, other)] == [False, False, True]


def test_a_plan_whose_recipes_are_not_known_waits_for_them(folder, caplog):
    about = machine(7)
    _, plans = train(*about)
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "tried": [{**row, "recomputes": [1]} for row in kept["tried"]]}))
    with caplog.at_level(logging.INFO, "offload"):
        _, others = train(*about)
    assert others == plans
    assert "earlier" not in caplog.text


SCRIPT = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    import torch, offload
    from offload.control.plan_search import PlanSearch
    PlanSearch.is_shared, PlanSearch.are_disturbed = False, lambda *_: False  # other tests run at the same time
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[each for _ in range(6) for each in (torch.nn.Linear(256, 256), torch.nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    handle = offload.enable(model, max_slowdown=float(sys.argv[1]), min_tensor_bytes="64KiB")
    for _ in range(100):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("plan", handle.plan.peak_bytes, sum(each.abs().sum().item() for each in model.parameters()))
"""


def test_two_processes(folder):
    """Of a real training; without a search, and with one of the same bits."""
    runs = [run_fresh_python(SCRIPT, "3.0", OFFLOAD_SEARCH_ANEW=off) for off in ("0", "0", "1")]
    begun = ["beginning with a plan of an earlier search" in run for run in runs]
    ended = ["the search ends with a plan" in run for run in runs]
    assert ended[0]
    assert begun == [False, True, False]
    assert len([*folder.glob("search-*.json")]) == 1
    assert len({run.split()[-1] for run in runs}) == 1
