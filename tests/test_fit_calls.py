"""`offload fit` of scripts with more calls: of parts, of the model again, of another one, of checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from live_bytes import Peak
from torch import nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import offload
from offload.capacity import unmodified, without_data
from offload.capacity.device import parse_device
from offload.capacity.optimizer_step import OptimizerWatch
from offload.control.registry import enabled_models
from offload.plan import unswapped_bytes

ROWS = 4096
DEVICE = "130MiB,12GB/s,4TFLOP/s"


def mlp(width: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width))


class Checkpointed(nn.Module):
    """Its blocks run again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(self.reentrant)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(*, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for _ in range(2):  # gradients are accumulated
            model(torch.randn(ROWS, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(loss: Callable[[nn.Sequential], torch.Tensor]) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_part() -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        x = torch.randn(ROWS, 128)
        return model(x).square().mean() + model[0](x + 0.1).abs().mean()

    trained(loss)


def two_views() -> None:
    def loss(model: nn.Sequential) -> torch.Tensor:
        a, b = model(torch.randn(ROWS, 128)), model(torch.randn(ROWS, 128))
        return (1 - nn.functional.cosine_similarity(a, b)).mean()

    trained(loss)


def two_models() -> None:
    """Most of what the second one needs is its parameters."""
    generator, critic = mlp(), nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 32768), nn.AvgPool1d(32), nn.GELU())
    optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
    for _ in range(2):
        made = generator(torch.randn(32, 128))
        softplus(critic(made.detach())).mean().backward()
        optimizers[1].step()
        softplus(-critic(made)).mean().backward()
        optimizers[0].step()
        del made
        for each in optimizers:
            each.zero_grad()


def reentrant() -> None:
    checkpointed(reentrant=True)


def not_reentrant() -> None:
    checkpointed(reentrant=False)


SCRIPTS = [reentrant, not_reentrant, a_part, two_views, two_models]


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    for each in list(enabled_models()):
        if each.model is not None:
            offload.disable(each.model)


@pytest.mark.parametrize("script", SCRIPTS)
def test_only_models_are_enabled(script, monkeypatch):
    """And only their calls count while the optimizer is awaited."""
    calls: list[int] = []
    monkeypatch.setattr(unmodified.Enabled, "count_call", lambda _: calls.append(1))
    watch = OptimizerWatch()
    with unmodified.enable_models(watch) as found:
        script()
    watch.close()
    names = {reentrant: ["Checkpointed"], not_reentrant: ["Checkpointed"], two_models: ["Sequential", "Sequential"]}
    assert found.names == names.get(script, ["Sequential"])
    assert len(calls) == {a_part: 2, two_models: 6}.get(script, 4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_step_without_data_needs_what_it_needs(script):
    peak = Peak()
    with peak.watch():
        script()
    counted = without_data.CountedScript(parse_device(DEVICE))
    with pytest.raises(SystemExit), counted.running():
        script()
    step = counted.step()
    assert step is not None
    needed = max(*unswapped_bytes(step.trace), counted.watch.peak_bytes)
    assert needed == pytest.approx(peak.nbytes, rel=0.05)
