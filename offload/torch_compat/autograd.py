"""State of autograd from private interfaces: the running node, the end of a backward pass, active hooks.

Hooks use it at every unpack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from offload.torch_compat.dispatch import mode_count
from offload.torch_compat.overrides import unseen

__all__ = [
    "backward_caller",
    "call_at_end_of_backward",
    "checkpoint_is_innermost",
    "hooks_forbidden_reason",
    "innermost_hooks",
    "is_script_tracing",
    "is_tracing",
    "keeps_graph",
]

# Looked up once, because every step needs them and torch._C is a large module.
_dispatch_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
# Whether TorchScript (torch.jit.trace) traces in this thread.
is_script_tracing: Callable[[], bool] = torch._C._is_tracing


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running in this thread ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_caller(device: torch.device) -> Callable[[Callable[[], None]], None]:
    """Return what calls a function in the thread in which autograd runs backward passes over tensors on `device`.

    No mode of the program sees the small backward pass that does this, and it is not compiled. Its two tensors are
    allocated now; the call allocates nothing on the device.
    """
    with torch._C.DisableTorchFunction():
        leaf, gradient = unseen(_zeros, device), unseen(_zeros, device)

    def call(function: Callable[[], None]) -> None:
        compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
        disabled = compiled_autograd._disable() if compiled_autograd is not None else nullcontext()
        with disabled, torch._C.DisableTorchFunction():
            unseen(_call_in_backward, leaf, gradient, function)

    return call


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def _call_in_backward(leaf: Tensor, gradient: Tensor, function: Callable[[], None]) -> None:
    with torch.enable_grad():
        leaf.requires_grad_()
        result = leaf.view_as(leaf)
        result.register_hook(lambda _: function())  # type: ignore[no-untyped-call]
        torch.autograd.grad(result, leaf, gradient)


def innermost_hooks(*, while_tracing: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the saved-tensor hooks that apply in this thread; None if there are none.

    Parameters
    ----------
    while_tracing
        Whether to return them also while torch.compile or make_fx traces, although they do not apply then.
    """
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(while_tracing)
    return found


def hooks_forbidden_reason() -> str | None:
    """Return torch's reason why saved-tensor hooks are forbidden in this thread; None if they are allowed."""
    reason: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return reason


def checkpoint_is_innermost() -> bool:
    """Return whether the innermost hooks are those of non-reentrant checkpointing; hooks inside would disable it."""
    hooks = innermost_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__


def is_tracing() -> bool:
    """Return whether TorchScript or torch.export traces in this thread. Tensors may have no data then."""
    return bool(mode_count() and _dispatch_mode(_FAKE) is not None) or is_script_tracing()


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def keeps_graph() -> bool:
    """Return whether the backward pass that runs keeps its graph, as with ``retain_graph=True``; True if not known."""
    return _keeps_graph is None or bool(_keeps_graph())
