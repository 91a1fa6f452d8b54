"""The driver's handle of torch's current stream.

Accelerators read it at every pack and unpack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["raw_current_stream"]


def raw_current_stream(kind: str) -> Callable[[int], int] | None:
    """Return a function from a device's ordinal to the handle of its current stream, without creating a stream object.

    None if this torch has no such function.
    """
    found: Callable[[int], int] | None = getattr(torch._C, f"_{kind}_getCurrentRawStream", None)
    return found
