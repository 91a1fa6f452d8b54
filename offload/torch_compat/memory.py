"""Reports when torch's CUDA allocator runs out of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["observe_out_of_memory"]


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> bool:
    """Call `observer` whenever a CUDA allocation fails, until this process ends. Return False if not available.

    Parameters
    ----------
    observer
        Called with the device's ordinal and three sizes in bytes: requested, total, free.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    attach(observer)
    return True
