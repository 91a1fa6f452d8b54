"""`offload fit`: moved optimizer state as a choice, beside what moving it then really leaves in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import Peak, tell_blocks_of_all
from page_check import charts_of
from torch import nn

import offload
from offload.capacity import optimizer_step
from offload.capacity.answer import answer
from offload.capacity.optimizer_step import MovedState, with_optimizer
from offload.capacity.page import render
from offload.capacity.temporaries import temporary_bytes
from offload.optimizer_state import mover, streamed_state
from offload.optimizer_state.forecast import StateForecast, forecast, still_written
from offload.plan.trace import Link, Node, SavedTensor, Trace
from offload.runtime.engine import Engine

HERE = Path(__file__).parent
WIDTH, LAYERS = 512, 10  # each weight has 1 MiB, and 2 MiB of Adam's state
MIB = 1 << 20
LOOSE = 1 << 10  # of real steps: the element that is left of each tensor that has moved, and the loss
LINK = Link(1e9, 2e9)


@pytest.fixture(name="small_chunks")
def small_chunks_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the state were many times as large."""
    for name, nbytes in (("CHUNK_BYTES", 2 * MIB), ("AHEAD_BYTES", 2 * MIB), ("BEHIND_BYTES", 2 * MIB)):
        monkeypatch.setattr(mover, name, nbytes)


@pytest.fixture(name="large_weights")
def large_weights_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the state of each weight were many times as large as what is read ahead and written behind."""
    for name, nbytes in (("CHUNK_BYTES", 32 << 10), ("AHEAD_BYTES", 64 << 10), ("BEHIND_BYTES", 64 << 10)):
        monkeypatch.setattr(mover, name, nbytes)


def make(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    return model, kind(model.parameters(), **options)


def step(model: nn.Module, optimizer: Any, rows: int = 64) -> None:
    model(torch.randn(rows, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def engines() -> Iterator[list[Engine]]:
    """The engines that are made within."""
    found: list[Engine] = []
    undo = tell_blocks_of_all()
    init = Engine.__init__

    def noting(self: Engine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found.append(self)

    Engine.__init__ = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Engine.__init__ = init  # type: ignore[method-assign]
        undo()


def happens(rows: int, **options: Any) -> int:
    """The most bytes of tensors during a step with moved state, counted from outside."""
    with engines() as made:
        model, optimizer = make(**options)
        handle = offload.enable(model, n_tensors=-1, lb=1, optimizer=optimizer, optimizer_state=True)
        for _ in range(2):
            step(model, optimizer, rows)
        for engine in made:
            engine.drain()
            engine.collect()
        # What the program holds would stay in memory: no variable may hold the state.
        held = sum(
            value.untyped_storage().nbytes() for row in dict.values(optimizer.state) for value in row.values()
        ) + sum(each.nbytes for each in model.parameters())
        peak = Peak()
        with peak.watch():
            step(model, optimizer, rows)
        assert handle.report().optimizer_state[0].failed == 0
        handle.disable()
    return held + peak.nbytes


def fitted(memory: int, rows: int, **options: Any) -> Any:
    model, optimizer = make(**options)
    return offload.fit(
        model,
        lambda n: torch.randn(n, WIDTH),
        memory=memory,
        batch=rows,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=optimizer,
    )


@pytest.mark.usefixtures("small_chunks")
def test_what_stays_in_memory_is_counted() -> None:
    found = fitted(36 * MIB, 64)
    moved = found.choices[-1]
    assert moved.name == "state moved"
    assert moved.moved.nbytes == 2 * LAYERS * MIB
    assert found.best is moved
    assert found.line == 'offload.enable(model, memory_limit="36MiB", optimizer=optimizer, optimizer_state=True)'
    assert "MOVED OPTIMIZER STATE" in found.verdict()
    assert "the model and its optimizer" in str(found)
    assert all(each.plan is None for each in found.choices[:-1]), "it does not fit in another way"
    real = happens(64)
    assert real - LOOSE <= found.least_bytes <= real + 2 * MIB
    assert real < found.peak_bytes - 8 * MIB


@pytest.mark.usefixtures("large_weights")
@pytest.mark.parametrize("foreach", [None, True])
def test_large_weights_move_one_by_one(foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = fitted(MIB, 64, foreach=foreach), happens(64, foreach=foreach)
    # Weights and gradients; of the state 2 MiB, 2 MiB that are read ahead and 1 MiB that is written; 2 MiB temporaries.
    assert found.least_bytes == pytest.approx(27 * MIB, abs=MIB)
    assert real - LOOSE <= found.least_bytes <= real + 1.5 * MIB, "the tensor that is written may be gone by then"
    if foreach:
        monkeypatch.setattr(optimizer_step, "temporary_bytes", lambda optimizer, chunks, undivided: undivided)
        assert fitted(MIB, 64, foreach=True).least_bytes > real + 6 * MIB, "with those of all weights at once"


def test_a_step_that_reads_values_is_not_counted_without_them() -> None:
    model, optimizer = make(torch.optim.Adafactor)
    step(model, optimizer)
    model(torch.randn(64, WIDTH)).square().mean().backward()
    assert temporary_bytes(optimizer, [list(model.parameters())], 7 * MIB) == 7 * MIB


@pytest.mark.usefixtures("small_chunks")
def test_nothing_fits_and_the_least_is_told() -> None:
    found = fitted(16 * MIB, 64)
    assert not found.fits
    assert "even with all possible swaps and moved optimizer state" in found.verdict()
    assert found.in_the_way[0].bytes == pytest.approx(found.least_bytes, abs=MIB)


def forecast_and_counts(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[Any, Any]:
    """What was told of an optimizer in a hook of its step, and what moving it then counted."""
    model, optimizer = make(kind, **options)
    told: list[Any] = []

    def tell(stepped: Any, *_: object) -> None:
        device = torch.device("cpu")
        told.append(forecast(stepped, lambda state, name: streamed_state.would_leave(state, name, device, MIB)))

    hook = optimizer.register_step_post_hook(tell)
    step(model, optimizer)
    hook.remove()
    with offload.enable(model, optimizer=optimizer, optimizer_state=True) as handle:
        step(model, optimizer)
        counts = handle.report().optimizer_state[0]
    return told[0], counts


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "no state": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_forecast_is_what_moving_counts(kind: str) -> None:
    told, counts = forecast_and_counts(KINDS[kind][0], **KINDS[kind][1])
    assert told.nbytes == counts.nbytes
    assert bool(told.stays) == (counts.nbytes == 0)
    assert told.step_bytes <= told.nbytes


def test_what_the_program_holds_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    step(model, optimizer)
    device = torch.device("cpu")
    held = optimizer.state[next(iter(model.parameters()))]["exp_avg"]

    def told() -> int:
        found = forecast(optimizer, lambda state, name: streamed_state.would_leave(state, name, device, MIB))
        return found.nbytes

    assert told() == (2 * LAYERS - 1) * MIB
    monkeypatch.setattr(streamed_state, "_HELD_ONCE", sys.maxsize >> 1)
    assert told() == 2 * LAYERS * MIB, "with the guard left out"
    assert held is not None


class Other(torch.optim.Adam):
    """Not one of torch's: it may use all parameters at once."""


@pytest.mark.usefixtures("small_chunks")
def test_an_unknown_optimizer_steps_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    told = forecast_and_counts(Other)[0]
    assert told.step_bytes == told.nbytes == 2 * LAYERS * MIB
    monkeypatch.setattr("offload.optimizer_state.forecast.is_known", lambda optimizer: True)
    assert forecast_and_counts(Other)[0].step_bytes < told.nbytes, "with the guard left out"


def test_state_that_is_moved_already_is_not_fetched() -> None:
    model, optimizer = make()
    with offload.enable(model, optimizer=optimizer, optimizer_state=True) as handle:
        step(model, optimizer)
        read = handle.report().optimizer_state[0].in_bytes
        found = forecast(optimizer, lambda state, name: True)
        assert found.stays == "it is moved already"
        assert handle.report().optimizer_state[0].in_bytes == read


@pytest.mark.parametrize("stays", ["another optimizer", "too small"])
def test_why_state_is_not_moved_is_told(stays: str) -> None:
    if stays == "too small":
        model = nn.Linear(8, 8)
        found = offload.fit(model, lambda n: torch.randn(n, 8), optimizer=torch.optim.Adam(model.parameters()))
        assert "smaller than min_tensor_bytes" in str(found).replace("\n", " ")
    else:
        model, optimizer = make()
        holder = optimizer.state
        found = offload.fit(model, lambda n: torch.randn(n, WIDTH), batch=64, optimizer=optimizer)
        assert "such as an optimizer that wraps it, holds its `state`" in str(found).replace("\n", " ")
        assert holder is optimizer.state
    assert [each.name for each in found.choices][-1] != "state moved"


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def trace() -> Trace:
    nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    return Trace(nodes, (100,) * 4, (SavedTensor(0, 40, 0, 0, 1, 3, 3),))


def test_state_leaves_but_for_what_is_still_written() -> None:
    moved = MovedState(nbytes=60, model_bytes=10, peak_bytes=80)
    then = moved.within(with_optimizer(trace(), 130))
    assert then.base_bytes == (50, 50, 50, 50, 80)


def test_the_choice_takes_what_the_copies_take() -> None:
    moved = MovedState(nbytes=60, model_bytes=10, peak_bytes=80)
    found = answer("a", with_optimizer(trace(), 130), LINK, 95, (100, 100, 100, 100, 130), (), moved)
    assert found.best is not None
    assert found.best.moved is moved
    plan = found.best.plan
    assert found.best.seconds(plan) == pytest.approx(plan.expected_seconds + 60 / 1e9 + 60 / 2e9)
    assert found.to_dict()["choices"][-1]["moved_state_bytes"] == 60
    assert found.least_bytes == 90
    assert not answer("a", with_optimizer(trace(), 130), LINK, 89, (100,) * 4 + (130,), (), moved).fits


def test_several_optimizers_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "BEHIND_BYTES", 100)
    rows = [(30,), (60,), (90,)]  # one optimizer each
    assert still_written(rows[:1]) == 30
    assert still_written(rows[:2]) == 90
    assert still_written(rows) == 90, "the second one has been written before: both are more than the bound"


def test_nobody_waits_for_the_newest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AHEAD_BYTES", "BEHIND_BYTES"):
        monkeypatch.setattr(mover, name, 1)
    found = StateForecast(((4, 4), (4, 4), (4, 4), (4, 4)))
    assert still_written(found.chunks) == 4
    assert found.step_bytes == 8 + 8 + 4, "a chunk, the next one, and one tensor of the last one"
    assert StateForecast(((4, 4),)).step_bytes == 8
    assert replace(found, is_divided=False).step_bytes == found.nbytes == 32


# -- the slowdown -----------------------------------------------------------------------------------------------------

SLOW = Link(30.0, 30.0)
CHUNKS = MovedState(nbytes=60, model_bytes=10, peak_bytes=80, chunks=(30, 30))


def fitting(moved: MovedState, link: Link, limit: int = 95) -> Any:
    """An update of two seconds behind four seconds of forward and backward."""
    return answer("a", with_optimizer(trace(), 130, 2.0), link, limit, (100,) * 4 + (130,), (), moved)


def test_copies_of_state_overlap_with_computation() -> None:
    choice = fitting(CHUNKS, SLOW, 1000).choices[-1]
    # The first chunk is read for a second. Then it is updated while the second one is read; both leave during the rest.
    assert choice.seconds(choice.plan) == pytest.approx(7.0)
    assert choice.slowdown(choice.plan) == pytest.approx(1 / 6)
    whole = fitting(replace(CHUNKS, chunks=()), SLOW, 1000).choices[-1]
    assert whole.seconds(whole.plan) == pytest.approx(6.0 + 2 + 2), "an optimizer that steps all at once waits for all"


def test_a_link_whose_speed_is_not_known_gives_no_slowdown() -> None:
    found = fitting(CHUNKS, replace(SLOW, is_steady=False))
    assert found.best is found.choices[-1], "nothing else fits"
    assert "MOVED OPTIMIZER STATE in 95 B, slowdown not measured (" in found.verdict()
    figures = found.to_dict()["choices"][-1]
    assert figures["fits"]
    assert figures["slowdown"] is figures["step_seconds"] is None
    assert "%" not in found.rows()[1][-1][1]
    other = fitting(CHUNKS, replace(SLOW, is_steady=False), 140)
    assert other.best is other.choices[0], "one whose slowdown is known comes first"


def test_the_page_shows_the_update_and_no_curve_whose_time_is_not_known() -> None:
    step = with_optimizer(trace(), 130, 2.0)
    for link, names in ((SLOW, ["swap", "state moved"]), (replace(SLOW, is_steady=False), ["swap"])):
        page = render(fitting(CHUNKS, link), step, link)
        cost, plan = charts_of(page)
        assert [curve["name"] for curve in cost["curves"]] == names
        assert "optimizer" in page
        assert plan["curves"][0]["name"].startswith("state moved, nothing swapped")


def test_a_large_slowdown_is_told_in_times_of_the_step() -> None:
    found = fitting(CHUNKS, Link(0.5, 0.5))
    assert found.best.slower(found.best.plan).endswith("× the time")
    assert float(found.best.slower(found.best.plan).split()[0]) > 10


def test_the_watch_times_the_update_and_names_the_link() -> None:
    found = fitted(64 * MIB, 64)
    assert found.choices[-1].plan.trace.nodes[-1].seconds > 0
    watch = optimizer_step.OptimizerWatch()
    watch._forecasts.append(StateForecast(((4, 4),)))
    assert "The slowdown is predicted for a link with 30 B/s out and 30 B/s in." in watch.notes(SLOW)[0]
    assert "speed of the link (30 B/s out" in watch.notes(replace(SLOW, is_steady=False))[0]


# -- a script ---------------------------------------------------------------------------------------------------------


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.full
def test_a_script_with_much_state_fits_once_it_is_moved() -> None:
    script, limit = HERE / "unmodified" / "wide.py", 640 * MIB
    done = run("-m", "offload", "fit", script, "--memory", limit, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["fits"] == "state moved"
    assert said["peak_bytes"] > limit
    words = ["--line", f"import offload; {said['line']}"]
    done = run(HERE / "unmodified_run.py", "--behind", "optimizer = ", *words, script)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
    assert real <= said["least_bytes"] + 8 * MIB
    assert real <= limit
    assert optimizer_step.SMALLEST_BYTES == MIB
