"""The page of an out-of-memory error in a planned step: memory over time, up to where the step was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_pages import MIB, out_of_memory, plan
from page_check import charts_of, check_page
from planned_rig import batch, known_link, make  # noqa: F401
from some_rows import one_in
from torch import nn

import offload
from offload.control.limits import LIMITS
from offload.control.promise import SlowdownPromise
from offload.control.running_step import RunningStep
from offload.diagnostics.html import plan as plan_page
from offload.diagnostics.html.chart import chart


def stacks(text: str) -> list[dict[str, Any]]:
    check_page(text)
    return charts_of(text)


def test_the_chart_ends_with_the_node_of_the_failure() -> None:
    whole = charts_of(plan_page.figure(plan()))[0]
    (cut,) = stacks(out_of_memory())
    made = plan()
    end = made.timing.finish[14]
    assert cut["end"] == pytest.approx(end)
    assert cut["limit"] == 1100 * MIB
    for _, boxes in cut["lanes"]:
        assert all(start < stop <= end + 1e-9 for _, _, start, stop, *_ in boxes)
    assert 0 < len(cut["tensors"]) <= len(whole["tensors"])
    for row in cut["tensors"]:
        times = row[4:]
        assert times == sorted(times)
        assert times[-1] <= end + 1e-9
    assert cut["curves"][0]["x"][-1] == pytest.approx(end)
    assert cut["curves"][0]["y"][-1] == made.timing.resident[14], "not that of the node behind it"
    shown = {row[3] for row in cut["tensors"]}
    assert shown == {each.id for each in made.trace.tensors if made.timing.ready[each.produced] < end}


@pytest.mark.parametrize("node", [0, 23, 99])
def test_the_first_and_the_last_node(node: int) -> None:
    figure = plan_page.figure(plan(), last_node=min(node, 23))
    assert charts_of(figure)[0]["end"] == pytest.approx(plan().timing.finish[min(node, 23)])
    assert charts_of(chart("nothing", seconds=0.0, origin="a"))[0]["tensors"] == []


def test_a_step_without_a_plan_has_a_bar() -> None:
    (bar,) = stacks(out_of_memory(planned=False))
    assert bar["unit"] == "bytes"
    assert bar["tensors"] == []


@pytest.mark.parametrize("place", one_in(3, ["backward", "forward", "optimizer"]))
def test_a_planned_step_that_fails_shows_how_far_it_was(place: str, tmp_path: Path) -> None:
    model, optimizer = make()
    page = tmp_path / "oom.html"
    with offload.enable(model, "smallest", min_tensor_bytes="4KiB", recompute=False) as handle:
        for number in range(4):
            x, y = batch(256, number)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        hooks = {
            "forward": lambda: model[3].register_forward_hook(refuse),
            "backward": lambda: model[3].register_full_backward_hook(refuse),
            "optimizer": lambda: optimizer.register_step_pre_hook(refuse),
        }
        hooks[place]()
        x, y = batch(256, 9)
        with pytest.raises(MemoryError) as caught, handle.explain_oom(page):
            train_once(model, optimizer, x, y)
        made, node = caught.value.offload_explanation.running
        assert made is handle.plan
        nodes = made.trace.nodes
        backward = next(k for k, each in enumerate(nodes) if each.backward)
        assert {"forward": node < backward, "backward": node >= backward, "optimizer": node == len(nodes) - 1}[place]
        if place == "forward":
            assert nodes[node].name.startswith(("2", "3", "4"))
    (cut,) = stacks(page.read_text("utf-8"))
    assert cut["end"] == pytest.approx(made.timing.finish[node])
    assert f"in node {node + 1} of {len(nodes)}" in page.read_text("utf-8")


@pytest.mark.parametrize("keeps_all", [True, False])
def test_a_reference_step_that_fails_has_a_place_and_says_that_it_kept_every_tensor(
    keeps_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, kept_share=1.0))
    monkeypatch.setattr("offload.control.promise.free_bytes", lambda device: (1 << 60) * keeps_all)
    monkeypatch.setattr(SlowdownPromise, "needs_plan", lambda promise, planned: False)
    monkeypatch.setattr(SlowdownPromise, "_wants_reference", lambda promise, planned: planned.steps == 3)
    model, optimizer = make()
    with offload.enable(model, max_slowdown=1e9, min_tensor_bytes="4KiB", recompute=False) as handle:
        for number in range(3):
            train_once(model, optimizer, *batch(256, number))
        model[3].register_forward_hook(refuse)
        with pytest.raises(MemoryError) as caught, handle.explain_oom():
            train_once(model, optimizer, *batch(256, 9))
        explanation = caught.value.offload_explanation
        made, _ = explanation.running
        assert handle.plan.swaps
        assert made.swaps == (() if keeps_all else handle.plan.swaps)
    assert (
        "give memory_limit with max_slowdown: then reference steps stay within the limit" in str(explanation)
    ) == keeps_all


def refuse(*_: object) -> None:
    raise MemoryError


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


class Executor:
    """Stands for a step's executor."""

    on_schedule = True

    class cursor:
        node = 5


def test_only_a_step_that_follows_its_plan_has_a_place() -> None:
    running, executor = RunningStep(), Executor()
    assert running.place() is None
    made: Any = plan()
    running.follows(executor, made)  # type: ignore[arg-type]
    assert running.place() == (made, 5)
    executor.on_schedule = False
    assert running.place() is None, "it has deviated"
    executor.on_schedule = True
    running.end()
    assert running.place() is None, "another step has begun"
    running.follows(executor, made)  # type: ignore[arg-type]
    del executor
    assert running.place() is None, "it is over, and nothing is kept alive"
