"""State of autograd that torch exposes only in private interfaces: running node, end of a backward pass, active hooks.

Hooks use it at every unpack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = [
    "call_at_end_of_backward",
    "checkpoint_is_innermost",
    "current_node",
    "hooks_forbidden_reason",
    "innermost_hooks",
    "is_tracing",
]

# The autograd node that is running in this thread; None outside of a backward pass.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward pass that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def innermost_hooks(*, while_tracing: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks that apply in this thread now; None where there are none.

    Parameters
    ----------
    while_tracing
        Whether to tell them also while torch.compile or make_fx traces, when they do not apply.
    """
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(while_tracing)
    return found


def hooks_forbidden_reason() -> str | None:
    """Why saved-tensor hooks are forbidden in this thread, in torch's words; None where they are allowed."""
    reason: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return reason


def checkpoint_is_innermost() -> bool:
    """Whether non-reentrant checkpointing has hooks on; hooks put on inside would undo it."""
    hooks = innermost_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__


def is_tracing() -> bool:
    """Whether TorchScript or torch.export traces in this thread, with tensors that may hold nothing."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or torch._C._is_tracing()
