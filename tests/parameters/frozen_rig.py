"""Models with frozen parameters, trained plain and with these parameters moved, to be compared bit by bit."""

import time

import torch
from core.store_rig import make_store
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.parameters.moved_parameter import MovedParameter
from offload.parameters.mover import ParameterMover
from offload.runtime.engine import Engine

MIN_BYTES = 2048
WIDTH = 32
STEPS = 20
FREED_SECONDS_MAX = 60


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = Adapted(nn.Linear(WIDTH, 3 * WIDTH))
        self.out = Adapted(nn.Linear(3 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.out(F.gelu(self.into(self.norm(x)))))


class Model(nn.Module):
    """Blocks between a frozen layer and a head with the same weight."""

    is_checkpointed = False

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.head.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


class Attends(nn.Module):
    """Frozen layers that hand their parameters to one function, or read them as views."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).requires_grad_(False)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True).requires_grad_(False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1).requires_grad_(False)
        self.table = nn.Embedding(100, WIDTH, _weight=torch.randn(100, WIDTH) / 10).requires_grad_(False)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.kept = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10, requires_grad=False)

    def forward(self, x):
        x = self.scale(x)[:, None].expand(-1, 5, -1)
        x = x + self.attention(x, x, x)[0] + self.lstm(x)[0] + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x @ self.kept.t() + x @ self.kept
        # Parameters of a module that does not run itself.
        return x @ self.table.weight.t() + F.linear(x, self.table.weight)


def make_model(kind=Model):
    torch.manual_seed(0)
    return kind()


def batch(number):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(model, number):
    return model(batch(number)).float().square().mean()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model, steps=STEPS, begin=0, loss=loss_of):
    """Losses and gradients of all steps."""
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    found = []
    torch.manual_seed(begin)
    for number in range(begin, begin + steps):
        value = loss(model, number)
        value.backward()
        found += [value.detach(), *(parameter.grad for parameter in trained(model))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def everything(model):
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
        assert not a.isnan().any()


def enable(model, folder, **knobs):
    given = {"n_tensors": -1, "min_tensor_bytes": MIN_BYTES, "spill_dir": folder, "parameters": "frozen", **knobs}
    return offload.enable(model, **given)


def make_mover(model, tier, folder, **options):
    """Without a session, on a store of any tier."""
    engine = Engine(make_store(tier, folder, host_bytes_max=2 << 20), torch.device("cpu"))
    mover = ParameterMover(model, engine, MIN_BYTES, lambda parameter: f"p{parameter.numel()}", **options)
    mover.wrap()
    return mover


def assert_all_freed(engine):
    """Abandoned copy-ins free their tickets when they end."""
    engine.drain()
    until = time.monotonic() + FREED_SECONDS_MAX
    while engine.store_stats()["live_tickets"] and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.store_stats()["live_tickets"] == 0


def away(model):
    """Of each parameter that leaves memory, whether it is away now."""
    moved = {id(p): p for p in model.parameters() if type(p) is MovedParameter}.values()
    return [parameter._offload_stored.is_away_in(parameter) for parameter in moved]


def assert_away(model):
    found = away(model)
    assert found
    assert all(found)
