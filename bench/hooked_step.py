"""A small ResNet's training step without hooks, and with the engine's hooks and a plan that keeps every tensor.

A memory limit above the peak keeps the hooks installed. Every step is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from contest import alternate, medians, seconds
from hook_rig import NO_LIMIT_BYTES
from models import FAMILIES, batch_of, build, loss_of

import offload

# About 95 ms on one core, and 240 saved tensors.
SIZE: dict[str, int] = {**FAMILIES["resnet"].quick, "batch": 6}
WARMUPS = 3


def step_seconds(*, rounds: int, spill_dir: str, quick: bool) -> tuple[dict[str, float], int]:
    """Median seconds of a step by contestant, and how many tensors it saves."""
    size = FAMILIES["resnet"].tiny if quick else SIZE
    steps: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name in ("plain", "offload"):
            model = build("resnet", size, seed=0, device="cpu", dtype=torch.float32)
            if name == "offload":
                handle = offload.enable(model, memory_limit=NO_LIMIT_BYTES, spill_dir=spill_dir)
                stack.callback(handle.disable)
            inputs, target = batch_of("resnet", size, seed=0, step=0, device="cpu", dtype=torch.float32)
            steps[name] = partial(seconds, partial(train, model, inputs, target))
        taken = medians(alternate(steps, rounds=rounds, warmups=WARMUPS))
        kept = handle.report().kept.values()
    return taken, sum(count.tensors for count in kept) // (rounds + WARMUPS)


def train(model: torch.nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> None:
    """One forward and one backward pass."""
    model.zero_grad()
    loss_of(model(inputs), target).backward()  # type: ignore[no-untyped-call]
