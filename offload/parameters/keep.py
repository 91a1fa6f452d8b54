"""Saved-tensor hooks that keep the memory of moved parameters out of the graph, for calls without a session's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.parameters.saved_parameter import SavedParameter
from offload.torch_compat.autograd import checkpoint_is_innermost, hooks_forbidden_reason, innermost_hooks
from offload.torch_compat.tensors import raise_changed, version_of

__all__ = ["Keep", "needs_keep"]

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks_may_hold_tensors() -> bool:
    """Return whether autograd, or hooks that are not the library's, would hold a saved parameter until backward."""
    hooks = innermost_hooks()
    if hooks is None:
        return True
    module = type(getattr(hooks[0], "__self__", None)).__module__
    return not (module.partition(".")[0] == __name__.partition(".")[0] or checkpoint_is_innermost())


def needs_keep() -> bool:
    """Return whether tensors that autograd saves now need the hooks of `Keep`, and hooks are allowed."""
    return torch.is_grad_enabled() and hooks_may_hold_tensors() and hooks_forbidden_reason() is None


class Keep:
    """Saved-tensor hooks that replace parameters and views of moved ones. Others are kept, or passed to other hooks.

    Parameters
    ----------
    saved
        Returns what replaces a parameter or a view of a moved one; None for other tensors.
    others
        The program's hooks that were innermost before; None if there were none.
    """

    def __init__(self, saved: Callable[[Tensor], SavedParameter | None], others: Hooks | None) -> None:
        self._saved = saved
        self._others = others

    def pack(self, tensor: Tensor) -> Any:
        """Return what a graph node holds instead of a tensor."""
        saved = self._saved(tensor)
        if saved is not None:
            return saved
        return (tensor, version_of(tensor)) if self._others is None else self._others[0](tensor)

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor as it was saved.

        Raises
        ------
        RuntimeError
            The tensor was changed in place since.
        ParameterError
            The tensor is of a parameter that cannot be read.
        """
        if isinstance(saved, SavedParameter):
            return saved.restore()
        if self._others is not None:
            return self._others[1](saved)
        tensor: Tensor
        tensor, version = saved
        if version_of(tensor) != version:
            raise_changed(tensor.type(), tuple(tensor.shape), version_of(tensor), version)
        return tensor
