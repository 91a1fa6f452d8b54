"""Reports when torch's CUDA allocator runs out of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["observe_out_of_memory"]


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer` whenever an allocation of torch's CUDA allocators fails, until this process ends.

    CUDA has to be initialized in torch: before, there are no allocators.

    Parameters
    ----------
    observer
        Called with the device's ordinal and three sizes in bytes: requested, total, free.
    """
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]
