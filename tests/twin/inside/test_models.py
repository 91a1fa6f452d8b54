"""Whole models train on the simulated accelerator as they do on the CPU, bit by bit."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from twin import sim

STEPS = 3


@pytest.fixture
def families(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "bench"))
    from models import FAMILIES, batch_of, build, loss_of

    return FAMILIES, batch_of, build, loss_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt", "lstm", "resnet", "unet", "vit"])
def test_a_family_trains_as_on_the_cpu(name, dtype, families):
    """Attention by its formula on both, the optimizer tensor by tensor, recurrent layers by the CPU's own kernels."""
    known, batch_of, build, loss_of = families
    size = known[name].tiny
    dtype = getattr(torch, dtype)

    def train(device):
        model = build(name, size, seed=0, device="cpu", dtype=dtype).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        losses = []
        for step in range(STEPS):
            x, y = batch_of(name, size, seed=0, step=step, device=device, dtype=dtype)
            with sdpa_kernel(SDPBackend.MATH):
                loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [each.cpu() for each in [*losses, *(parameter.grad for parameter in model.parameters())]]

    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled and name != "lstm"):
        expected = train("cpu")
        for seed in range(2):
            sim.schedule(seed, 200)
            assert all(map(torch.equal, expected, train("sim")))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_delays_change_no_bit(dtype, foreach, families):
    known, batch_of, build, loss_of = families
    size = known["lstm"].tiny
    dtype = getattr(torch, dtype)

    def train(seed):
        sim.schedule(seed, 200)
        model = build("lstm", size, seed=0, device="sim", dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
        for step in range(STEPS):
            x, y = batch_of("lstm", size, seed=0, step=step, device="sim", dtype=dtype)
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [each.detach().cpu() for each in [loss, *model.parameters()]]

    first = train(0)
    assert all(map(torch.equal, first, train(1)))
    assert all(map(torch.equal, first, train(2)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind(8, 16, num_layers=2, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0])


def train_recurrent(device, kind, dtype, options):
    torch.manual_seed(0)
    model = Recurrent(kind, **options).to(dtype).to(device)
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    loss = model(x).square().mean()
    loss.backward()
    return [each.cpu() for each in [loss.detach(), *(parameter.grad for parameter in model.parameters())]]


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False, "batch_first": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_train_as_on_the_cpu(kind, dtype, options):
    """The CPU's own kernels: not those of oneDNN, which has a whole layer as one operator."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert all(
            map(torch.equal, train_recurrent("sim", kind, dtype, options), train_recurrent("cpu", kind, dtype, options))
        )


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_fused_cells_train_alike_every_time(kind):
    """An accelerator's cell adds its biases elsewhere than the CPU's: other roundings, within which they agree."""

    def train(device):
        torch.manual_seed(0)
        cell = kind(8, 16).double().to(device)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        first = cell(x)
        second = cell(x, first)
        loss = (second if kind is nn.GRUCell else second[0]).square().mean()
        loss.backward()
        return [each.cpu() for each in [loss.detach(), *(parameter.grad for parameter in cell.parameters())]]

    found, expected = train("sim"), train("cpu")
    assert all(map(torch.equal, found, train("sim")))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_training_under_autocast_is_alike_every_time():
    def train(seed):
        sim.schedule(seed, 300)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to("sim")
        scaler = torch.amp.GradScaler("sim")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            x = torch.randn(8, 16, device="sim")
            with torch.autocast("sim", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]

    first = train(0)
    assert all(map(torch.equal, first, train(1)))
    assert all(bool(each.isfinite().all()) for each in first)


def test_dropout_is_drawn_anew_and_by_the_seed():
    model, x = nn.Dropout(0.5), torch.ones(64, device="sim")
    torch.manual_seed(0)
    first, second = model(x), model(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), first)
    assert not torch.equal(first, second)
