"""The temporaries of an optimizer's step for a few parameters at a time, counted on tensors without data.

`OptimizerWatch` asks for them, to tell what a step in chunks needs before any step is made in chunks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from offload.capacity.device import AbsentDevice
from offload.capacity.step_counter import StepCounter
from offload.optimizer_state.chunks import ChunkedStep, is_known
from offload.torch_compat.fake import NEEDS_VALUES, Fakes
from offload.torch_compat.optimizers import is_own_step, runs_foreach, step_behind_hooks

__all__ = ["temporary_bytes", "undivided_bytes"]

_UNTIMED = AbsentDevice(0, math.inf, math.inf)


def temporary_bytes(optimizer: torch.optim.Optimizer, chunks: Sequence[Sequence[Tensor]], undivided: int) -> int:
    """Return the most bytes of temporaries while the optimizer steps one chunk after the other.

    Parameters
    ----------
    optimizer
        It has stepped, and gradients are there still.
    chunks
        Of its parameters. Those with most bytes, in all or in one parameter, decide.
    undivided
        The temporaries of a step for all parameters at once: the answer if the step reads values of tensors.
    """
    updated = [[each for each in chunk if each.grad is not None] for chunk in chunks]
    sizes = {number: [each.nbytes for each in chunk] for number, chunk in enumerate(updated) if chunk}
    largest = {max(sizes, key=lambda number: measure(sizes[number])) for measure in (sum, max)} if sizes else ()
    try:
        return min(undivided, max((_counted(optimizer, updated[number]) for number in largest), default=0))
    except NEEDS_VALUES:
        return undivided


def undivided_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the most bytes of temporaries while the optimizer steps for all parameters at once, without a closure.

    None if they cannot be counted: it is none of torch's, something wraps its step, or the step reads values.
    """
    if not (is_known(optimizer) and is_own_step(optimizer, step_behind_hooks(optimizer))):
        return None
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    try:
        return _counted(optimizer, params)
    except NEEDS_VALUES:
        return None


def _counted(optimizer: torch.optim.Optimizer, chunk: Sequence[Tensor]) -> int:
    fakes = Fakes()
    params: dict[int, nn.Parameter] = {}
    for param in chunk:
        params[id(param)] = made = nn.Parameter(fakes.like(param.detach()))
        assert param.grad is not None
        made.grad = fakes.like(param.grad.detach())

    def like(value: Any) -> Any:
        """Numbers keep their values: the step may read them."""
        is_array = isinstance(value, Tensor) and value.numel() > 1
        return fakes.like(value) if is_array else value.detach().cpu().clone() if isinstance(value, Tensor) else value

    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(vars(optimizer))
    stand_in.state = defaultdict(dict)
    for param in chunk:
        stand_in.state[params[id(param)]] = tree_map(like, optimizer.state[param])
    stand_in.param_groups = []
    for group in optimizer.param_groups:
        own = [params[id(each)] for each in group["params"] if id(each) in params]
        stand_in.param_groups.append({**group, "params": own})
        if group.get("foreach", False) is None and not group.get("fused"):  # as torch chooses for the device
            used = [each for each in group["params"] if each.grad is not None]
            stand_in.param_groups[-1]["foreach"] = runs_foreach(used, differentiable=False)
    counter = StepCounter(nn.ParameterList(params.values()), _UNTIMED, fakes, [stand_in])
    with counter.counting():
        counter.watch_peak()
        before = counter.live_bytes
        ChunkedStep(stand_in, step_behind_hooks(optimizer)).run(list(params.values()))
    return counter.live_bytes_max - before
