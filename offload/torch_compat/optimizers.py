"""What only private interfaces of torch tell of optimizers and their state.

`optimizer_state` uses them in every optimizer step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from offload.torch_compat.tensors import storage_identity

__all__ = ["holds_alone", "nan_like", "raw_step", "runs_foreach", "steps_through_hooks"]

_forbid_writes: Callable[[Tensor], None] | None = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the function behind `optimizer.step`, which runs no step hooks."""
    return _without_hooks(type(optimizer).step)


def _without_hooks(step: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def steps_through_hooks(optimizer: Optimizer) -> bool:
    """Whether the unhooked step may call the step of a base class, which runs the hooks again."""
    own = raw_step(optimizer)
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
    if all(_without_hooks(step) is own for step in steps):
        return False
    code = getattr(inspect.unwrap(own), "__code__", None)
    return code is None or "step" in code.co_names


def runs_foreach(params: Sequence[Tensor], *, differentiable: bool) -> bool:
    """Whether torch chooses the foreach kernels for these parameters where the caller has chosen none."""
    return _default_to_fused_or_foreach(list(params), differentiable)[1]


def nan_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape over one NaN: it reads as NaN, and writing to it raises an error."""
    one = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    if _forbid_writes is not None:
        _forbid_writes(one)
    return one.expand(tensor.shape)


def _count_holders(tensor: Tensor) -> int:
    assert _holders is not None
    return _holders(storage_identity(tensor.untyped_storage()))


_ALONE = _count_holders(torch.empty(1)) if _holders is not None else 0


def holds_alone(tensor: Tensor) -> bool:
    """Whether no other tensor and no other process shares this one's storage, all of which it covers."""
    storage = tensor.untyped_storage()
    if _holders is None or storage.nbytes() != tensor.nbytes or tensor.storage_offset() != 0:
        return False
    if storage.device.type == "cpu" and storage.is_shared():
        return False
    del storage
    return _count_holders(tensor) == _ALONE
