"""Loops around accelerate: prepare, accumulate, mixed precision; enabled before `prepare` and after."""

from __future__ import annotations

import pytest
import torch
from frameworks import need
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

need("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

import offload  # noqa: E402

ON = {"n_tensors": -1, "min_tensor_bytes": 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.25), nn.Linear(64, 3))

    def forward(self, x):
        return self.net(x)


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(when: str | None, precision: str, steps: int):
    """A loop as accelerate's documentation has it: losses, the model, and the handle where there is one."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(72, 16, generator=generator), torch.randint(3, (72,), generator=generator)
    torch.manual_seed(0)
    model = Net()
    handle = offload.enable(model, **ON) if when == "before" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if when == "after":
        handle = offload.enable(model, **ON)
    losses = []
    for _ in range(2):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, accelerator.unwrap_model(model), handle


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("precision", "steps"), [("no", 1), ("no", 3), ("bf16", 1), ("bf16", 2)])
def test_the_same_losses_and_weights(when, precision, steps):
    expected, plain, _ = train(None, precision, steps)
    losses, swapped, handle = train(when, precision, steps)
    assert losses == expected
    for a, b in zip(swapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    report = handle.report()
    assert report.steps == 10
    assert report.swapped.tensors > 0
    assert list(swapped.state_dict()) == list(plain.state_dict())
    handle.disable()
    steps_before = handle.report().steps
    swapped(torch.ones(2, 16)).sum().backward()
    assert handle.report().steps == steps_before


def test_state_is_saved_and_loaded_with_the_engine_on(tmp_path):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Net())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with offload.enable(model, **ON) as handle:
        model(torch.ones(4, 16)).sum().backward()
        accelerator.save_state(str(tmp_path))
        nn.init.zeros_(model.net[0].weight)
        accelerator.load_state(str(tmp_path))
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in expected.items()
        }
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert handle.report().swapped.tensors > 0


def test_an_exception_in_the_loop_leaves_nothing_wrapped():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Net())
    before = vars(model)["forward"]

    def run() -> None:
        with offload.enable(model, **ON):
            model(torch.ones(4, 16)).sum().backward()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        run()
    assert vars(model)["forward"] is before


def test_accumulation_of_ours_under_accelerate():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Net().eval()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    model = accelerator.prepare(model)
    x, y = torch.randn(64, 16), torch.randint(3, (64,))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    for rows, labels in zip(x.split(16), y.split(16), strict=True):
        accelerator.backward(optimizer.scale(functional.cross_entropy(model(rows), labels), items=16))
        optimizer.step()
    for parameter, before, gradient in zip(model.parameters(), expected, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), before - 0.1 * gradient)
