"""Properties of optimizers and their state that torch exposes only in private interfaces.

`optimizer_state` uses them in every optimizer step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types
from torch.utils import _foreach_utils, _pytree

from offload.torch_compat.tensors import forbid_writes

__all__ = [
    "allow_foreach",
    "choose_foreach_for",
    "has_own_hooks",
    "is_called_by_state_dict",
    "is_own_step",
    "nan_like",
    "register_as_tree",
    "runs_foreach",
    "step_behind_hooks",
    "steps_through_hooks",
]

# Code of the function that runs the step hooks; torch wraps the step of each class in such a function.
_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__
_STATE_DICT = inspect.unwrap(Optimizer.state_dict).__code__
_CONVERT = Optimizer._process_value_according_to_param_policy.__code__  # of the values that are loaded


def step_behind_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step function that the hooks of an optimizer surround.

    In a hook before the step, this is the function that runs next. It may differ from the one behind
    `type(optimizer).step`, which may be a wrapper around the function that runs the hooks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer:
            running: Callable[..., Any] = frame.f_locals["func"]
            return running
        frame = frame.f_back
    return _without_hooks(type(optimizer).step)  # no hook is running, or it was called from compiled code


def has_own_hooks(optimizer: object) -> bool:
    """Return whether an optimizer has step hooks of its own. A wrapper has none, or passes on its optimizer's."""
    return "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", ())


def _without_hooks(step: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step
    return found


def is_own_step(optimizer: Optimizer, step: Any) -> bool:
    """Return whether a function is the step that the optimizer's class or a base defines, without other wrappers."""
    while hasattr(step, "__wrapped__"):
        if not _is_torchs(step) or step.__code__ is _HOOKED:
            return False
        step = step.__wrapped__
    return _is_torchs(step) or getattr(step, "__qualname__", "") in {
        f"{kind.__qualname__}.step" for kind in type(optimizer).__mro__
    }


def _is_torchs(function: Any) -> bool:
    return f"{getattr(function, '__globals__', {}).get('__name__', '')}.".startswith("torch.")


def steps_through_hooks(optimizer: Optimizer) -> bool:
    """Return whether the step behind the hooks may call the step of a base class, which runs the hooks again."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
    own = _without_hooks(type(optimizer).step)
    if all(_without_hooks(vars(kind)["step"]) is own for kind in kinds):
        return False
    functions = [
        inspect.unwrap(each)
        for kind in type(optimizer).__mro__
        if not f"{kind.__module__}.".startswith("torch.")
        for each in vars(kind).values()
        if callable(each)
    ]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return not hasattr(inspect.unwrap(own), "__code__") or any("step" in each.co_names for each in _nested(codes))


def _nested(codes: Sequence[object]) -> Iterator[CodeType]:
    for code in codes:
        if isinstance(code, CodeType):
            yield code
            yield from _nested(code.co_consts)


def is_called_by_state_dict() -> bool:
    """Return whether `Optimizer.state_dict` itself, not one of its hooks, has called the caller of this function."""
    return sys._getframe(2).f_code is _STATE_DICT


def is_called_by_load_state_dict() -> bool:
    """Return whether the caller of this function is called where `Optimizer.load_state_dict` converts loaded state."""
    return sys._getframe(2).f_code is _CONVERT


def runs_foreach(params: Sequence[Tensor], *, differentiable: bool) -> bool:
    """Return whether torch chooses the foreach kernels for these parameters if the caller has not chosen."""
    return _default_to_fused_or_foreach(list(params), differentiable)[1]


def allow_foreach(kind: type[Tensor]) -> None:
    """Have torch choose foreach kernels for parameters of a class where it chooses them for ordinary ones."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def choose_foreach_for(kind: type[Tensor]) -> None:
    """Have `torch.nn.utils` choose foreach kernels for gradients of a class as for plain tensors."""
    _foreach_utils._foreach_supported_types.append(kind)


def nan_like(tensor: Tensor) -> Tensor:
    """Return a NaN scalar expanded to the tensor's shape. Writing to it raises an error.

    One that stands for a single element has the tensor's strides too.
    """
    one = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    if forbid_writes is not None:
        forbid_writes(one)
    return one.as_strided(tensor.shape, tensor.stride()) if tensor.numel() == 1 else one.expand(tensor.shape)


def register_as_tree(kind: type, like: type) -> None:
    """Make `tree_map` and the like look into containers of a class as they do into those of its base class `like`."""
    node = _pytree.SUPPORTED_NODES[like]
    flatten_with_keys = node.flatten_with_keys_fn
    _pytree.register_pytree_node(kind, node.flatten_fn, node.unflatten_fn, flatten_with_keys_fn=flatten_with_keys)
