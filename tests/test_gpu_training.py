"""Whole training on an accelerator, with everything that offload moves: losses, weights and state are the same bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import KIND, is_simulated
from gpu_rig import LONG_IF_SIMULATED, assert_nothing_left, cuda  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional

import offload

pytestmark = pytest.mark.gpu

# A processor computes what runs on the simulated one. Of the state, only tensors of at least 1 MiB move.
WIDTH, ROWS = (512, 64) if is_simulated else (512, 2048)
STEPS = 5
Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def adamw(**options: Any) -> Optimizers:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def train(
    knobs: dict[str, Any] | None,
    *,
    steps: int = STEPS,
    make: Optimizers | None = None,
    dropout: float = 0.0,
    frozen: bool = False,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    backwards: int = 1,
    compiled: str = "",
    check: Callable[[Any], None] = lambda handle: None,
) -> list[Tensor]:
    """Losses, weights and optimizer state; `check` is given the handle after the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(4))).to(KIND)
    model[:2].requires_grad_(not frozen)
    optimizer = (make or adamw(foreach=False))(each for each in model.parameters() if each.requires_grad)
    scaler = torch.amp.GradScaler(KIND, enabled=scaled) if scaled else None
    handle = None
    for when in ("before", "enable", "after"):
        if when == "enable" and knobs is not None:
            handle = offload.enable(model, optimizer=optimizer, min_tensor_bytes="16KiB", **knobs)
        if when == compiled:
            for block in model:
                block.compile()
    found: list[Tensor] = []
    for step in range(steps):
        x = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(step)).to(KIND)
        with torch.autocast(KIND, autocast, enabled=autocast is not None):
            loss = model(x).float().square().mean()
        for more in range(backwards - 1, 0, -1):
            loss.backward(retain_graph=bool(more))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        found.append(loss.detach())
        del loss
    found += [parameter.detach() for parameter in model.parameters()]
    state = optimizer.state_dict()["state"]
    found += [value for _, each in sorted(state.items()) for _, value in sorted(each.items()) if torch.is_tensor(value)]
    found = [each.cpu().clone() for each in found]
    if handle is not None:
        check(handle)
        handle.disable()
        assert_nothing_left(handle)
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def moved_state(handle: Any) -> None:
    assert handle.report().optimizer_state[0].in_bytes > 0


def swapped(handle: Any) -> None:
    assert handle.report().swapped.tensors > 0


def moved_parameters(handle: Any) -> None:
    assert handle.report().moved_parameters.in_bytes > 0


STATE = {"n_tensors": 0, "optimizer_state": True}
ALL = {"n_tensors": -1, "optimizer_state": True, "step_in_backward": True, "parameters": "all"}
MOVED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], None]]] = {
    "by hand": ({"n_tensors": -1}, {}, swapped),
    "dropout": ({"n_tensors": -1}, {"dropout": 0.1}, swapped),
    "state": (STATE, {}, moved_state),
    "state, foreach": (STATE, {"make": adamw(foreach=True)}, moved_state),
    "state, momentum": (
        {**STATE, "gradients": True},
        {"make": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)},
        moved_state,
    ),
    "in backward": ({**STATE, "step_in_backward": True}, {}, moved_state),
    "frozen": ({"n_tensors": 0, "parameters": "frozen"}, {"frozen": True}, moved_parameters),
    "all parameters": ({"n_tensors": 0, "parameters": "all"}, {}, moved_parameters),
    "everything": (ALL, {}, moved_parameters),
    "everything, autocast": (ALL, {"autocast": torch.bfloat16}, moved_parameters),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "everything" else LONG_IF_SIMULATED) for name in MOVED]
)
def test_what_moves_comes_back(name: str) -> None:
    knobs, how, check = MOVED[name]
    assert_same(train(knobs, check=check, **how), train(None, **how))


@pytest.mark.parametrize("wish", [{}, {"memory_limit": 0.5}, {"recompute": False}], ids=str)
@pytest.mark.parametrize("backwards", [1, 2])
def test_plans(wish: dict[str, Any], backwards: int) -> None:
    how: dict[str, Any] = {"steps": 10, "backwards": backwards}
    assert_same(train(wish, check=swapped, **how), train(None, **how))


ONLY_CUDA = pytest.mark.skipif(is_simulated, reason="needs CUDA's own: fused kernels, GradScaler, Triton or NCCL")


@ONLY_CUDA
@pytest.mark.parametrize("knobs", [{"n_tensors": -1}, STATE], ids=str)
def test_a_scaler(knobs: dict[str, Any]) -> None:
    how: dict[str, Any] = {"autocast": torch.float16, "scaled": True, "make": adamw(fused=True)}
    assert_same(train(knobs, **how), train(None, **how))


@ONLY_CUDA
@pytest.mark.parametrize(("compiled", "knobs"), [("before", {}), ("after", {"n_tensors": -1})], ids=["before", "after"])
def test_compiled_blocks(compiled: str, knobs: dict[str, Any]) -> None:
    assert_same(train(knobs, steps=8, compiled=compiled), train(None, steps=8, compiled=compiled))


def train_one_rank(kind: str) -> None:
    """Train with DDP, or with parameters sharded by FSDP2: plain and offloaded give the same bits."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def run(knobs: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(0.0) for _ in range(4))).cuda()
        model: nn.Module = DistributedDataParallel(blocks) if kind == "ddp" else blocks
        if kind == "fsdp":
            for block in blocks:
                fully_shard(block)
            fully_shard(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = offload.enable(model, optimizer=optimizer, **knobs) if knobs is not None else None
        for step in range(STEPS):
            x = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(step)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            swapped(handle)
            moved_state(handle)
            handle.disable()
        whole = [getattr(each, "to_local", lambda each=each: each)() for each in model.parameters()]
        return [each.detach().cpu() for each in whole]

    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("nccl")
    try:
        assert_same(run({"n_tensors": -1, "optimizer_state": True}), run(None))
    finally:
        torch.distributed.destroy_process_group()


@ONLY_CUDA
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_rank(kind: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = [str(Path(__file__).parent), str(Path(offload.__file__).parents[1])]
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    environment = {**os.environ, **rank, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", f"import test_gpu_training; test_gpu_training.train_one_rank({kind!r})"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
