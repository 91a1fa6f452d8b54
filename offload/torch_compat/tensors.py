"""What torch tells of a tensor only privately.

On the data path: hooks ask here at every pack that may swap.
"""

from __future__ import annotations

import torch

__all__ = ["has_own_bytes"]


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the bytes that it shows: neither wrapped by functorch nor a zero tensor without memory."""
    return not tensor._is_zerotensor() and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
