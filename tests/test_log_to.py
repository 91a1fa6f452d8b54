"""`handle.log_to`: each step's figures in TensorBoard, in a run of W&B, or in a function."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import need
from planned_rig import batch, known_link, make  # noqa: F401
from torch import nn

import offload

NAMES = {
    "offload/peak_mib",
    "offload/saved_mib",
    "offload/swapped_mib",
    "offload/stalled_ms",
    "offload/slowdown_percent",
}


class Run:
    """What `wandb.init` returns, as far as it is used here."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], bool]] = []
        self.defined: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, float], commit: bool = True) -> None:
        self.logged.append((values, commit))


@pytest.fixture(name="handle")
def handle_fixture() -> Iterator[offload.Session]:
    model, _ = make()
    with offload.enable(model, "smallest", min_tensor_bytes="4KiB") as handle:
        handle.model = model
        yield handle


def train(handle: Any, steps: int) -> None:
    for number in range(steps):
        x, y = batch(256, number)
        nn.functional.cross_entropy(handle.model(x), y).backward()


@pytest.mark.long
def test_a_function_gets_every_step_but_the_one_under_way(handle: Any) -> None:
    told: list[tuple[int, dict[str, float]]] = []
    handle.log_to(lambda figures, step: told.append((step, figures)))
    train(handle, 8)
    assert [step for step, _ in told] == list(range(1, 8))
    last = told[-1][1]
    assert set(last) == NAMES
    plan = handle.plan
    assert last["offload/saved_mib"] == (plan.unswapped_peak_bytes - plan.peak_bytes) / (1 << 20) > 0
    stalled = sum(figures["offload/stalled_ms"] for _, figures in told) / 1e3
    assert 0 < stalled <= handle.report().store["stall_seconds"]
    assert last["offload/peak_mib"] > 0
    swapped = sum(figures["offload/swapped_mib"] for _, figures in told)
    train(handle, 1)  # the step under way is logged now
    swapped += told[-1][1]["offload/swapped_mib"]
    assert len(told) == 8
    assert 0 < swapped * (1 << 20) <= handle.report().swapped.nbytes


def test_a_run_of_weights_and_biases(handle: Any) -> None:
    run = Run()
    handle.log_to(run)
    train(handle, 3)
    assert run.defined == [("offload/*", "offload/step")]
    assert [values["offload/step"] for values, _ in run.logged] == [1, 2]
    assert not any(commit for _, commit in run.logged), "the loop's own log ends a step of the run"
    committing = Run()
    handle.log_to(committing, commit=True)
    train(handle, 1)
    assert [commit for _, commit in committing.logged] == [True]


def test_tensorboard(handle: Any, tmp_path: Path) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        handle.log_to(writer)
        train(handle, 5)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    assert [event.step for event in events.Scalars("offload/peak_mib")] == [1, 2, 3, 4]
    plan = handle.plan
    saved = events.Scalars("offload/saved_mib")[-1].value
    assert saved == pytest.approx((plan.unswapped_peak_bytes - plan.peak_bytes) / (1 << 20))


def test_a_real_run_of_weights_and_biases(handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")  # needs no account when it is offline
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    with wandb.init(mode="offline", project="offload", dir=str(tmp_path)) as run:
        handle.log_to(run)
        train(handle, 3)  # before the loop logs anything, the run has no step of its own
        run.log({"loss": 1.0})
        train(handle, 2)
        run.log({"loss": 0.5})
        assert run.step == 2, "figures of offload are no steps of the run"
        summary = dict(run.summary)
    assert summary["loss"] == 0.5
    assert summary["offload/step"] == 4
    assert summary["offload/peak_mib"] > 0
    assert {name for name in summary if name.startswith("offload/")} == {*NAMES, "offload/step"}


def test_a_writer_of_scalars(handle: Any) -> None:
    """What TensorBoard's writer is used for, where it is not installed."""

    class Writer:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            self.rows.append((tag, value, global_step))

    writer = Writer()
    handle.log_to(writer)
    train(handle, 3)
    assert {tag for tag, _, _ in writer.rows} <= NAMES
    assert {step for _, _, step in writer.rows} == {1, 2}


def test_by_hand_and_switched_off() -> None:
    told: list[int] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        handle.log_to(lambda figures, step: told.append(step))
        for _ in range(6):
            model(torch.randn(64, 64)).sum().backward()
    assert told == [1, 2, 3, 4, 5]
    model(torch.randn(64, 64)).sum().backward()
    assert told[-1] == 5


@pytest.mark.parametrize("target", [7, logging.getLogger("training")])
def test_what_is_no_logger(target: object) -> None:
    with offload.enable(nn.Linear(2, 2)) as handle, pytest.raises(TypeError, match="log_to takes a SummaryWriter"):
        handle.log_to(target)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_logger_that_raises_ends_one_step_and_is_dropped(handle: Any, error: type[BaseException]) -> None:
    told: list[int] = []
    tried: list[int] = []

    def full(figures: dict[str, float], step: int) -> None:
        tried.append(step)
        if step == 2:
            raise error("no space left on the device of the logger")

    handle.log_to(full)
    handle.log_to(lambda figures, step: told.append(step))
    train(handle, 2)
    with pytest.raises(error, match="no space left on the device of the logger"):
        train(handle, 1)
    reference, _ = make()
    reference.load_state_dict(handle.model.state_dict())
    for model in (handle.model, reference):
        model.zero_grad(set_to_none=True)
        for number in range(3):
            x, y = batch(256, number)
            nn.functional.cross_entropy(model(x), y).backward()
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (handle.model, reference)]
    assert all(torch.equal(mine, its) for mine, its in zip(*gradients, strict=True))
    assert tried == [1, 2], "nothing more is logged there"
    assert told == [1, 3, 4, 5], "the other one gets every step but the one that failed"
    assert handle.report().swapped.tensors > 0


def test_a_disabled_handle_refuses_a_logger() -> None:
    with offload.enable(nn.Linear(2, 2)) as handle:
        pass
    with pytest.raises(ValueError, match=r"log_to: offload is disabled on this model; call offload\.enable first"):
        handle.log_to(print)
