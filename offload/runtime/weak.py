"""Callbacks that do not keep their owner alive.

Beside the data path: what is global, or belongs to a part, calls its owner back without being a reason for it to stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method for somebody else to call; nothing happens when its owner is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
