"""The reasons for which an optimizer's step cannot be divided into steps for a few parameters each.

`StateMover` checks them at each step. `in_backward.py` checks them when the optimizer is given, and at each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.optim import LBFGS, Adafactor, Optimizer

from offload.torch_compat.optimizers import is_own_step, steps_through_hooks

__all__ = ["HELD_ONCE", "why_it_stays", "why_its_kind_is_not_divided", "why_not_divided"]

_SAMPLE = SimpleNamespace(state={})
HELD_ONCE = sys.getrefcount(_SAMPLE.state)  # reference count of an attribute's value that no other code holds


def why_it_stays(optimizer: Optimizer) -> str:
    """Return why no state of an optimizer can be moved; empty if state can be."""
    why = why_its_kind_is_not_divided(optimizer)
    if not why and sys.getrefcount(optimizer.state) > HELD_ONCE:
        return (
            "other code, such as an optimizer that wraps it, holds its `state` dictionary; moving state replaces this "
            "dictionary, and the other code would keep the old one"
        )
    return why


def why_its_kind_is_not_divided(optimizer: Optimizer) -> str:
    """Return why no step of this optimizer can be divided; empty if steps can be."""
    if isinstance(optimizer, LBFGS):
        return "LBFGS uses the state of all parameters at once, several times per step"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "a capturable step may run in a CUDA graph, which uses the state at the addresses of the capture"
    if steps_through_hooks(optimizer):
        return "its step calls the step of a base class, whose hooks would run within it"
    return ""


def why_not_divided(optimizer: Optimizer, step: Callable[..., Any]) -> str:
    """Return why `step`, the function behind the hooks, cannot be called for a few parameters; empty if it can."""
    if not is_own_step(optimizer, step):
        return "its class's step has been replaced or wrapped by a function, which is called once for all parameters"
    if hasattr(type(optimizer), "__del__"):
        return "its class has a `__del__`, which would run for each part of a step"
    if any(len(set(group["params"])) < len(group["params"]) for group in optimizer.param_groups):
        return "a group has a parameter twice"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "a capturable step may run in a CUDA graph"
    if isinstance(optimizer, Adafactor) and any(map(_has_one_eps, optimizer.param_groups)):
        return "with foreach, all parameters of a group have the default eps of the first one's dtype"
    return ""


def _has_one_eps(group: dict[str, Any]) -> bool:
    """Return whether Adafactor's foreach step takes one default eps for parameters of several dtypes."""
    return bool(group["foreach"] and group["eps"][0] is None and len({each.dtype for each in group["params"]}) > 1)
