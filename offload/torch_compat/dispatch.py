"""Operators below autograd, told to Python one by one: the stack of modes that torch asks at each of them.

Recipes are recorded with such a mode, and run with all modes off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode", "can_record", "is_compiling", "mode_count", "push_mode", "remove_mode", "undisturbed"]

# Modes on this thread's stack.
mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
# One call into C, which no interrupt divides, where `with mode:` also sets flags that only other kinds of modes need.
push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack

_callback_of_tracer: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def is_compiling() -> bool:
    """Whether this thread is within a region of torch.compile, eager parts of it included.

    When such a region ends, torch restores the dispatch keys that were there when it began, whatever modes are on then.
    """
    return callable(_callback_of_tracer())


def can_record() -> bool:
    """Whether this torch lets a mode leave compiled code alone; else torch.compile would give up under one."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile does not notice, and that does not load the compiler: 843 modules, 71 MiB."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode off this thread's stack; those above it, if anybody left some there, stay.

    Returns
    -------
    bool
        False where it is not there: somebody has taken all modes off, and will put them back.
    """
    above = []
    if not any(torch._C._get_dispatch_stack_at(i) is mode for i in range(mode_count())):
        return False
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for each in reversed(above):
        push_mode(each)
    return True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Operators inside are those that are called: no autograd, no casts, no mode, no override of a subclass."""
    modes: list[Any] = []
    has_gradients = torch.is_grad_enabled()
    try:
        while mode_count():
            modes.append(torch._C._pop_torch_dispatch_stack(None))
        # Not `no_grad`, whose Python code an interrupt may leave half done.
        torch._C._set_grad_enabled(False)
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_grad_enabled(has_gradients)
        for mode in reversed(modes):
            push_mode(mode)
