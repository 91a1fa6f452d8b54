"""The driver's handle of torch's current stream.

Accelerators read it at every pack and unpack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["raw_current_stream"]


def raw_current_stream(kind: str) -> Callable[[int], int] | None:
    """What tells the current stream's handle of a device of this kind, given its ordinal, without a stream object.

    None where this torch has no such function.
    """
    found: Callable[[int], int] | None = getattr(torch._C, f"_{kind}_getCurrentRawStream", None)
    return found
