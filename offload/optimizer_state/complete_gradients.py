"""Hooks on an optimizer's parameters, which run as soon as a gradient is complete.

`StepInBackward` then updates the parameter. `GradientMover` moves the gradient out when the next one is complete too,
or at the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.torch_compat.compiled import opaque, untraced

__all__ = ["CompleteGradients"]


Owner = TypeVar("Owner")


class CompleteGradients(Generic[Owner]):
    """Calls a function of `owner` with each parameter whose gradient is complete. Hooks do not keep `owner` alive."""

    def __init__(self, owner: Owner, when_complete: Callable[[Owner, Tensor], None]) -> None:
        self._hook = _WhenComplete(weakref.ref(owner), when_complete)
        self._hooked: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Add the hook to each trained parameter that does not have it yet."""
        self._hooked = [each for each in self._hooked if each[0]() is not None]
        known = {id(reference()) for reference, _ in self._hooked}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and id(param) not in known:
                    handle = param.register_post_accumulate_grad_hook(self._hook)
                    self._hooked.append((weakref.ref(param), handle))

    def remove(self) -> None:
        """Take all hooks away."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()


class _WhenComplete(Generic[Owner]):
    """The hook of a parameter."""

    def __init__(self, owner: weakref.ref[Owner], when_complete: Callable[[Owner, Tensor], None]) -> None:
        self._owner = owner
        self._when_complete = when_complete

    @opaque
    def __call__(self, param: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            untraced(self._when_complete, owner, param)
