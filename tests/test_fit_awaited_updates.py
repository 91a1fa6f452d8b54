"""`offload fit` where the optimizer steps late or with a closure: after accumulated gradients, in Lightning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import run_python
from frameworks import need
from torch import Tensor, nn

from offload.capacity.optimizer_step import OptimizerWatch, watching_optimizers
from offload.capacity.unmodified import CALLS_MAX, enable_models

MIB = 1 << 20

LARGE_WEIGHTS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
optimizer, batch = torch.optim.AdamW(model.parameters()), (16, 1024)
"""
WEIGHTS = 4 * (2 * 1024 * 2048 + 1024 + 2048)
LARGE_ACTIVATIONS = """
import torch
from torch import nn
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())])
optimizer, batch = torch.optim.AdamW(model.parameters()), (4096, 512)
"""
GRADIENTS = 4 * 4 * (512 * 512 + 512)
PLAIN = """
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(batch)).square().mean().backward()
    optimizer.step()
"""
ACCUMULATES = """
for step in range(100):
    model(torch.randn(batch)).square().mean().backward()
    if step % {every} == {every} - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(batch)).square().mean()
    loss.backward()
    return loss
for _ in range(100):
    optimizer.step(closure)
"""
LIGHTNING = """
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, rows, number):
        return self.model(rows).square().mean()
    def configure_optimizers(self):
        return optimizer
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches={every}, **options)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8 * batch[0], batch[1]), batch_size=batch[0]))
"""
NEVER = """
for step in range(100):
    rows = torch.randn(batch[0] + step // 10, batch[1])  # each new shape is profiled
    model(rows).square().mean().backward()
    print("step", step, flush=True)
"""


def fit(folder: Path, source: str) -> tuple[dict[str, Any], str]:
    """What the command answers, and what else it prints."""
    script = folder / "train.py"
    script.write_text(source)
    done = run_python("-m", "offload", "fit", script, "--memory", "1GiB", "--json", timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(name="plain_bytes", scope="module")
def plain_bytes_fixture(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The peak of a plain loop."""
    nbytes: int = fit(tmp_path_factory.mktemp("plain"), LARGE_WEIGHTS + PLAIN)[0]["peak_bytes"]
    return nbytes


@pytest.mark.parametrize("every", [2, pytest.param(16, marks=pytest.mark.long)])
def test_the_update_after_accumulated_gradients_is_counted(tmp_path: Path, plain_bytes: int, every: int) -> None:
    found, _ = fit(tmp_path, LARGE_WEIGHTS + ACCUMULATES.replace("{every}", str(every)))
    assert found["peak_bytes"] == plain_bytes > 4 * WEIGHTS, "weights, gradients, state, temporaries"
    assert not any("is not counted" in note for note in found["notes"])


@pytest.mark.parametrize("every", [4, pytest.param(2, marks=pytest.mark.long)])
def test_steps_that_accumulate_hold_the_state(tmp_path: Path, every: int) -> None:
    """The first steps are measured before there is any; one of them tries recomputation."""
    found, _ = fit(tmp_path, LARGE_ACTIVATIONS + ACCUMULATES.replace("{every}", str(every)))
    plain, _ = fit(tmp_path, LARGE_ACTIVATIONS + PLAIN)
    assert found["peak_bytes"] == pytest.approx(plain["peak_bytes"] + GRADIENTS, abs=MIB / 8)


def test_a_script_whose_optimizer_never_steps_is_ended(tmp_path: Path) -> None:
    found, printed = fit(tmp_path, LARGE_WEIGHTS + NEVER)
    assert any("is not counted" in note for note in found["notes"])
    steps = printed.count("step ")
    assert CALLS_MAX < steps < CALLS_MAX + 9, "first those until the trial step is over, or not awaited"


def test_how_many_calls_are_awaited() -> None:
    model = nn.Linear(2, 2)
    with watching_optimizers() as watch, enable_models(watch) as enabled:
        model(torch.randn(2, 2)).sum().backward()
        assert enabled.await_optimizer()
        for _ in range(CALLS_MAX):
            model(torch.randn(2, 2)).sum().backward()
        with pytest.raises(SystemExit):
            model(torch.randn(2, 2))
        with pytest.raises(SystemExit):
            torch.optim.SGD(model.parameters()).step()
        assert not enabled.await_optimizer()


# -- closures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_the_update_of_a_step_with_a_closure_is_counted(tmp_path: Path, plain_bytes: int, every: int) -> None:
    if every:
        need("lightning")
    found, _ = fit(tmp_path, LARGE_WEIGHTS + (LIGHTNING.replace("{every}", str(every)) if every else CLOSURE))
    assert found["peak_bytes"] == pytest.approx(plain_bytes, abs=MIB / 8)
    assert not any("is not counted" in note for note in found["notes"])


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(8, 512)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def watched(kind: Callable[..., torch.optim.Optimizer], *, with_closure: bool) -> OptimizerWatch:
    """Two steps that are watched from their beginning."""
    model = nn.Linear(512, 512)
    optimizer = kind(model.parameters())
    closure: Any = closure_of(model, optimizer)
    with watching_optimizers() as watch:
        watch.listen()
        for _ in range(2):
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return watch


def test_a_watched_closure() -> None:
    found, plain = watched(torch.optim.AdamW, with_closure=True), watched(torch.optim.AdamW, with_closure=False)
    assert found.peak_bytes == pytest.approx(plain.peak_bytes, abs=1024)
    assert found.state_bytes == plain.state_bytes > 2 * 4 * 512 * 512
    assert found.moved is not None
    assert plain.moved is not None
    assert found.moved.nbytes == plain.moved.nbytes == 2 * 4 * 512 * 512
    assert not found.is_incomplete
    assert plain.seconds > 0
    assert found.seconds == 0, "it would be that of forward and backward too"


class Own(torch.optim.SGD):
    """Some optimizer that torch does not have."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, Own])
def test_updates_that_cannot_be_counted_with_a_closure(kind: Callable[..., torch.optim.Optimizer]) -> None:
    watch = watched(kind, with_closure=True)
    assert watch.is_incomplete
    assert watch.peak_bytes >= 2 * 4 * (512 * 512 + 512), "weights and gradients"
    assert not torch.autograd._profiler_enabled()
