"""Finds which module of a model is running, from Python's call stack.

Profiles and timelines show the module's name. Hooks on modules could find it too, but torch.compile would break its
graphs at these hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

from torch import nn

__all__ = ["running_module"]

_CALLS = frozenset((nn.Module.__call__.__code__, nn.Module._call_impl.__code__))


def running_module(names: Mapping[int, str]) -> str:
    """Return the name of the innermost module that is running in this thread; empty if there is none.

    Parameters
    ----------
    names
        Names of the modules by `id`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:  # only these frames: reading a frame's variables keeps them alive
            name = names.get(id(frame.f_locals.get("self")))
            if name:
                return name
        frame = frame.f_back
    return ""
