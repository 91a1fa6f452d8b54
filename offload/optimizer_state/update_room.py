"""Into which chunks the step of an optimizer whose state stays in memory is divided, so that it keeps `memory_limit`.

With foreach kernels, a step allocates temporary tensors for all parameters at once. A divided step allocates them for
one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.devices.accelerator import Accelerator
from offload.devices.device import device_of
from offload.optimizer_state.chunks import ChunkedStep, is_known, split
from offload.torch_compat.optimizers import runs_foreach
from offload.torch_compat.tensors import local_of

__all__ = ["STATE_MOST", "UpdateRoom", "step_divided"]

STATE_MOST = 3  # no optimizer of torch has more state than this many times the bytes of its parameters
TEMPORARIES_MOST = 3  # no foreach step of torch's optimizers allocates more than this many times the same bytes
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
        """Return how many bytes of parameters the step that begins may update together; None: all of them.

        None too if its temporaries are not known, because the optimizer is not one of torch's. `has_closure`: the step
        gets a closure, which may make the gradients.
        """
        if self._device is None or not is_known(optimizer):
            return None
        groups = [(group, _updated(group, has_closure)) for group in optimizer.param_groups]
        every, begun = [param for _, params in groups for param in params], optimizer.state
        made_bytes = STATE_MOST * _bytes_of([param for param in every if param not in begun])
        made_bytes += _bytes_of([param for param in every if param.grad is None])
        room = self._limit_bytes - self._device.allocated_bytes() - made_bytes
        if TEMPORARIES_MOST * _bytes_of(every) <= room:
            return None
        foreach_bytes = sum(_bytes_of(params) for group, params in groups if _runs_foreach(group, params))
        if not foreach_bytes or TEMPORARIES_MOST * foreach_bytes <= room:
            return None
        return max(_CHUNK_BYTES, room // TEMPORARIES_MOST)


def _updated(group: dict[str, Any], has_closure: bool) -> list[Tensor]:
    return [each for each in group["params"] if each.grad is not None or (has_closure and each.requires_grad)]


def _bytes_of(params: Sequence[Tensor]) -> int:
    return sum(local_of(param).nbytes for param in params)


def _runs_foreach(group: dict[str, Any], params: Sequence[Tensor]) -> bool:
    """Return whether a step uses foreach kernels for a group: its option, or torch's choice if there is none."""
    if group.get("fused") or "foreach" not in group:
        return False
    chosen: bool | None = group["foreach"]
    return runs_foreach(params, differentiable=bool(group.get("differentiable"))) if chosen is None else chosen


def step_divided(optimizer: Optimizer, step: Callable[..., Any], chunk_bytes: int) -> None:
    """Run `step`, the function behind the hooks, for at most `chunk_bytes` of parameters at a time."""
    divided = ChunkedStep(optimizer, step)
    try:
        for chunk in list(split(divided.params, lambda param: local_of(param).nbytes, chunk_bytes)):
            divided.run(chunk)
    finally:
        divided.end()
