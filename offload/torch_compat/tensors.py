"""What torch tells of a tensor only privately.

On the data path: hooks ask here at every pack that may swap.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter

from offload import _core

__all__ = ["has_own_bytes", "set_interface"]


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the bytes that it shows: neither wrapped by functorch nor a zero tensor without memory."""
    return not tensor._is_zerotensor() and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def set_interface() -> None:
    """Tell the extension what hooks ask of every tensor: attributes of its class, so that none is searched for."""
    _core.set_tensor_interface(
        tensor_type=torch.Tensor,
        parameter_type=Parameter,
        strided=torch.strided,
        layout=torch.Tensor.layout,
        is_nested=torch.Tensor.is_nested,
        nbytes=torch.Tensor.nbytes,
        base=torch.Tensor._base,
        version=torch.Tensor._version,
        is_leaf=torch.Tensor.is_leaf,
        is_view=torch.Tensor._is_view,
        detach=torch.Tensor.detach,
    )


set_interface()
