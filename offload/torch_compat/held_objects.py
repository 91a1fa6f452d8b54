"""Whether C++ code holds a parameter as an object: graphs that saved it, and the reducer of DDP.

Convolutions and normalizations save a parameter itself. Backward then reads the memory that the object has at that
time, and no count of the memory's holders shows it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from offload.torch_compat.overrides import call_without_overrides, requires_grad_of, unseen

__all__ = ["is_saved_itself", "may_be_reduced"]

_COUNT: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def is_saved_itself(parameter: Tensor) -> bool:
    """Return whether a graph whose backward pass is pending has saved this parameter itself.

    If `may_be_reduced`, one reference more than a new parameter has is taken for a graph's; two or more are taken for
    those of DDP's reducer, also if several graphs hold them.
    """
    more = unseen(_holders, parameter) - (_TRAINED if requires_grad_of(parameter) else _FROZEN)
    return more == 1 if may_be_reduced(parameter) else more > 0


def may_be_reduced(parameter: Tensor) -> bool:
    """Return whether the reducer of DDP may hold this parameter, and may give gradients its strides at any time."""
    distributed = torch.distributed
    return requires_grad_of(parameter) and distributed.is_available() and distributed.is_initialized()


def _holders(parameter: Tensor) -> int:
    """Return how many references from C++ the parameter has; if it is trained, one of them is its `AccumulateGrad`."""
    with torch.enable_grad():
        view = call_without_overrides(Tensor.view_as, (), (parameter, parameter))
    node = view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None
    del view
    count: int = call_without_overrides(_COUNT, (), (parameter,))
    del node
    return count


def _holders_of_new(requires_grad: bool) -> int:
    return _holders(nn.Parameter(torch.empty(1, device="cpu"), requires_grad))


_TRAINED, _FROZEN = unseen(_holders_of_new, True), unseen(_holders_of_new, False)
