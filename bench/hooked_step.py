"""A small ResNet's training step without hooks, with empty hooks, and with a plan that keeps every tensor.

Empty hooks return what they get: what torch itself takes to call hooks. A memory limit above the peak keeps the
engine's hooks installed. Every step is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from statistics import median

import torch
from contest import alternate, medians, seconds
from hook_rig import NO_LIMIT_BYTES
from models import FAMILIES, batch_of, build, loss_of
from torch.autograd.graph import saved_tensors_hooks

import offload

# 70 ms on one core, and 233 saved tensors.
SIZE: dict[str, int] = {**FAMILIES["resnet"].quick, "batch": 6}
WARMUPS = 3


def step_seconds(*, rounds: int, spill_dir: str, quick: bool) -> tuple[dict[str, float], dict[str, float], int]:
    """By contestant: median seconds of a step, median ratio to the plain step before it; how many tensors it saves."""
    size = FAMILIES["resnet"].tiny if quick else SIZE
    steps: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name in ("plain", "empty hooks", "offload"):
            model = build("resnet", size, seed=0, device="cpu", dtype=torch.float32)
            if name == "offload":
                handle = offload.enable(model, memory_limit=NO_LIMIT_BYTES, spill_dir=spill_dir)
                stack.callback(handle.disable)
            inputs, target = batch_of("resnet", size, seed=0, step=0, device="cpu", dtype=torch.float32)
            around = empty_hooks if name == "empty hooks" else nullcontext
            steps[name] = partial(seconds, partial(train, model, inputs, target, around))
        samples = alternate(steps, rounds=rounds, warmups=WARMUPS)
        kept = handle.report().kept.values()
    ratios = {
        name: median(mine / plain for mine, plain in zip(own, samples["plain"], strict=True))
        for name, own in samples.items()
    }
    return medians(samples), ratios, sum(count.tensors for count in kept) // (rounds + WARMUPS)


def empty_hooks() -> AbstractContextManager[object]:
    """Saved-tensor hooks that return what they get."""
    return saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def train(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    target: torch.Tensor,
    around: Callable[[], AbstractContextManager[object]],
) -> None:
    """One forward and one backward pass."""
    model.zero_grad()
    with around():
        loss_of(model(inputs), target).backward()  # type: ignore[no-untyped-call]
