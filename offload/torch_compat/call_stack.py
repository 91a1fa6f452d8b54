"""Finds which module of a model is running, from Python's call stack.

Profiles and timelines show the module's name. Hooks on modules would give it too, but torch.compile traces them and
breaks its graphs there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

from torch import nn

__all__ = ["running_module"]

_CALLS = frozenset((nn.Module.__call__.__code__, nn.Module._call_impl.__code__))


def running_module(names: Mapping[int, str]) -> str:
    """The innermost module whose call is running in this thread; empty where none with a name is.

    Parameters
    ----------
    names
        The modules' names by their identity.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:  # no other frame is asked for its variables: that would keep them alive
            name = names.get(id(frame.f_locals.get("self")))
            if name:
                return name
        frame = frame.f_back
    return ""
