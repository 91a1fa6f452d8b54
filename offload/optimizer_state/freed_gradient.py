"""A parameter's `grad` after the gradient was used and freed in backward: a tensor whose every use is an error.

`BegunStep` puts it there. The program's `zero_grad` removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.tensors import without_memory

__all__ = ["FreedGradient", "StepInBackwardError"]

_READ = (
    "this gradient was used in backward and is gone (step_in_backward=True): clipping by the norm of all gradients, a "
    "GradScaler and anything else that uses gradients before optimizer.step() need step_in_backward=False; hooks that "
    "are registered before offload.enable still see the gradient"
)
_ADDED_TO = (
    "a backward pass adds to a gradient that was used in backward and is gone (step_in_backward=True): call "
    "optimizer.step() and optimizer.zero_grad() after each backward pass; gradient accumulation, a loss in several "
    "backward passes, and reentrant checkpoints that share a parameter need step_in_backward=False"
)
_ZEROED = (
    "zero_grad(set_to_none=False) keeps gradients as zeros, but with step_in_backward=True they are already freed: "
    "call zero_grad()"
)
_ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class StepInBackwardError(RuntimeError):
    """The program uses gradients, weights or options in a way that `step_in_backward=True` does not allow."""


def _refuse(self: Tensor, *_: object, **__: object) -> NoReturn:
    raise StepInBackwardError(_READ)


class FreedGradient(Tensor):
    """A tensor that has a shape and no memory.

    Parameters
    ----------
    like
        The parameter.
    dtype, device
        Type and device of the gradient. Default: those of the parameter.

    Attributes
    ----------
    is_left
        Whether offload was disabled after the gradient was freed and before the optimizer's next step.

    Raises
    ------
    StepInBackwardError
        For every operator except one: when a module moves to another device or type, this tensor moves too.
    """

    is_left = False

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
        """Make a tensor without memory."""
        return without_memory(cls, like, dtype or like.dtype, device or like.device)

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise an error, unless the operator moves the tensor to another device or type."""
        if func is torch.ops.aten._to_copy.default:
            given = kwargs or {}
            moved = cls(args[0], given.get("dtype"), given.get("device"))
            moved.is_left = args[0].is_left
            return moved
        if func is torch.ops.aten.zero_.default or func is torch.ops.aten._foreach_zero_.default:
            raise StepInBackwardError(_ZEROED)
        is_addition = func in _ADDITIONS and current_node() is not None  # hooks in backward use other operators
        raise StepInBackwardError(_ADDED_TO if is_addition else _READ)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FreedGradient(shape={list(self.shape)})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage without bytes: torch.compile, torch.export and `share_memory` ask for it, and read none."""
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

    # Ways to its memory that bypass the dispatcher.
    __array__ = __deepcopy__ = __dlpack__ = __reduce_ex__ = data_ptr = numpy = tolist = _refuse
