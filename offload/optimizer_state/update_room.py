"""Divides the step of an optimizer whose state stays in memory into chunks, so that the step keeps `memory_limit`.

With foreach kernels, a step allocates temporary tensors for all parameters at once. A divided step allocates them for
one chunk at a time. `StateMover` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Optimizer

from offload.devices.accelerator import Accelerator
from offload.devices.device import device_of
from offload.optimizer_state.chunks import ChunkedStep, is_known, split
from offload.parameters.updating import is_away
from offload.torch_compat.optimizers import runs_foreach
from offload.torch_compat.tensors import local_of

__all__ = ["STATE_MOST", "UpdateRoom", "step_divided"]

STATE_MOST = 3  # no optimizer of torch has more state than this many times the bytes of its parameters
# No foreach step of torch's optimizers allocates more than this many times the bytes of its parameters.
TEMPORARIES_MOST = 3
_CHUNK_BYTES = 16 << 20  # parameters that are updated together even if their temporaries exceed the limit


class UpdateRoom:
    """How much memory is left within the limit for what an optimizer's step allocates, on an accelerator.

    On the CPU nothing is known about it; but there torch chooses no foreach kernels.

    Parameters
    ----------
    device
        The device of the model.
    limit_bytes
        The memory limit; None: no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        found = device_of(device) if limit_bytes is not None else None
        self._device = found if isinstance(found, Accelerator) else None
        self._limit_bytes = limit_bytes or 0

    def chunk_bytes(self, optimizer: Optimizer, *, has_closure: bool = False) -> int | None:
        """Return how many bytes of parameters may be updated together in the next step; None: all of them.

        None too if its temporaries are not known, because the optimizer is not one of torch's. `has_closure`: the step
        gets a closure, which may make the gradients.
        """
        if self._device is None or not is_known(optimizer):
            return None
        able = [group for group in optimizer.param_groups if _may_run_foreach(optimizer, group)]
        groups = [(group, params) for group in able if (params := _updated(group, has_closure))]
        if not groups:
            return None
        room = self._limit_bytes - self._device.allocated_bytes() - _made_bytes(optimizer, has_closure)
        if TEMPORARIES_MOST * sum(_bytes_of(params) for _, params in groups) <= room:
            return None
        most = TEMPORARIES_MOST * sum(_bytes_of(params) for group, params in groups if _runs_foreach(group, params))
        return max(_CHUNK_BYTES, room // TEMPORARIES_MOST) if most and most > room else None


def _may_run_foreach(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the options of a group allow foreach kernels that allocate temporaries."""
    chosen = group.get("foreach", False)
    if chosen is None:  # torch chooses
        has_tensor_rate = isinstance(group.get("lr"), Tensor) and not group.get("capturable")
        chosen = group.get("fused") is None and not has_tensor_rate and not isinstance(optimizer, Adafactor)
    if type(optimizer) is SGD:
        return bool(chosen and (group["weight_decay"] or group["maximize"]))
    return bool(chosen) and not group.get("fused")


def _runs_foreach(group: dict[str, Any], params: Sequence[Tensor]) -> bool:
    """Return whether a group whose options allow foreach kernels is stepped with them."""
    return bool(group["foreach"]) or runs_foreach(params, differentiable=bool(group.get("differentiable")))


def _made_bytes(optimizer: Optimizer, has_closure: bool) -> int:
    """Return an upper bound on the bytes that a step allocates besides temporaries.

    These are state that it creates, gradients that its closure makes, and parameters that are away.
    """
    made = 0
    for group in optimizer.param_groups:
        has_state = type(optimizer) is not SGD or bool(group["momentum"])
        for param in _updated(group, has_closure):
            nbytes = local_of(param).nbytes
            made += STATE_MOST * nbytes if has_state and param not in optimizer.state else 0
            made += nbytes * ((param.grad is None) + is_away(param))
    return made


def _updated(group: dict[str, Any], has_closure: bool) -> list[Tensor]:
    return [each for each in group["params"] if each.grad is not None or (has_closure and each.requires_grad)]


def _bytes_of(params: Sequence[Tensor]) -> int:
    return sum(local_of(param).nbytes for param in params)


def step_divided(optimizer: Optimizer, step: Callable[..., Any], chunk_bytes: int) -> None:
    """Run `step`, the function behind the hooks, for at most `chunk_bytes` of parameters at a time."""
    divided = ChunkedStep(optimizer, step)
    try:
        for chunk in list(split(divided.params, lambda param: local_of(param).nbytes, chunk_bytes)):
            divided.run(chunk)
    finally:
        divided.end()
