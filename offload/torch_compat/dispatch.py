"""The stack of dispatch modes, which see each operator below autograd.

Recipes are recorded with such a mode, and run with all modes off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import currentframe
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OperatorMode",
    "is_transformed",
    "mode_count",
    "modes_of_others",
    "push_mode",
    "remove_mode",
    "restores_keys",
    "undisturbed",
]

# Number of modes on this thread's stack.
mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
# One call into C, so an interrupt cannot divide it. `with mode:` also sets flags that only other kinds of modes need.
push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack

# Returns a callable if this thread is inside a region of torch.compile, including its eager parts.
_tracer: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback

# Returns the number of transforms of torch.func that this thread runs; None if it runs none.
_transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

# The dispatch key of a batched backward pass, which has no name in Python.
_parse_key: Any = torch._C._parse_dispatch_key
_VMAP_MODE = torch._C.DispatchKeySet(_parse_key("VmapMode"))

# The globals of functions that apply a transform of torch.func: `vmap`, and `jvp`, `grad` and the others.
_VMAP, _EAGER_TRANSFORMS = vars(vmap), vars(eager_transforms)


def is_transformed() -> bool:
    """Return whether a transform of torch.func (vmap, jvp, grad, …) runs in this thread, outside of operators.

    Parameters may then be wrapped, and so would be the tensors that offload makes.
    """
    return _transform_level() is not None


def restores_keys() -> bool:
    """Return whether this thread is inside a region of torch.compile, or a transform of torch.func.

    At the end of either, torch restores the dispatch keys of its start. If the stack of modes has changed within, keys
    and stack do not fit together any more: operators are not recorded, or every operator of this thread fails.

    A transform is found among the callers. Torch's own stack of transforms does not show it during an operator: this
    stack is shorter by one while the operator runs on the tensors that the transform has wrapped.
    """
    if callable(_tracer()):
        return True
    frame = currentframe()
    while frame is not None:
        if frame.f_globals is _EAGER_TRANSFORMS or frame.f_globals is _VMAP:
            return True
        frame = frame.f_back
    return False


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile ignores and that does not import the compiler (843 modules, 71 MiB)."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code ignores the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def modes_of_others() -> tuple[str, ...]:
    """Return the class names of the program's own modes on this thread's stack."""
    count = mode_count()
    if not count:
        return ()
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(count)]
    kinds = [type(mode) for mode in modes if not isinstance(mode, OperatorMode)]
    return tuple([f"{kind.__module__}.{kind.__qualname__}" for kind in kinds])


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Remove a mode from this thread's stack; modes above it, if there are any, are kept.

    Returns
    -------
    bool
        False if the mode is not on the stack: other code has removed all modes temporarily and will restore them.
    """
    above = []
    count = mode_count()
    if count and torch._C._get_dispatch_stack_at(count - 1) is mode:
        torch._C._pop_torch_dispatch_stack(None)
        return True
    if not any(torch._C._get_dispatch_stack_at(i) is mode for i in range(count)):
        return False
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for each in reversed(above):
        push_mode(each)
    return True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run exactly the operators that are called inside: no autograd, no autocast, no modes, no subclass overrides.

    In a batched backward pass (`is_grads_batched`), torch refuses random operators; those inside are no part of it.
    """
    modes: list[Any] = []
    has_gradients = torch.is_grad_enabled()
    try:
        while mode_count():
            modes.append(torch._C._pop_torch_dispatch_stack(None))
        # `no_grad` is not used: an interrupt in its Python code could leave gradients disabled.
        torch._C._set_grad_enabled(False)
        # A recipe may enable gradients again, for kernels that depend on grad mode; below autograd no graph is built.
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE),
            torch._C._DisableAutocast(),
            torch._C.DisableTorchFunction(),
        ):
            yield
    finally:
        torch._C._set_grad_enabled(has_gradients)
        for mode in reversed(modes):
            push_mode(mode)
