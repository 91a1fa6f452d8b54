"""Properties of a tensor that torch exposes only in private interfaces.

Hooks use them at every pack of a tensor that may be swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Parameter

from offload import _core

__all__ = [
    "StorageWatch",
    "address_keeper",
    "conjugated",
    "has_own_bytes",
    "negated",
    "set_interface",
    "storage_identity",
    "version_of",
]

# How often a tensor, or a view of the same memory, was changed in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# What tells a storage from every other one alive.
storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# A weak reference to a tensor, which keeps its address from being used again.
address_keeper: Callable[[torch.Tensor], object] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
# The same memory, read as conjugated or negated when it is used.
conjugated: Callable[[torch.Tensor], torch.Tensor] = torch._conj
negated: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view


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
        identity=torch.Tensor._cdata,
        untyped_storage=torch.Tensor.untyped_storage,
        storage_nbytes=torch.UntypedStorage.nbytes,
        storage_identity=torch.UntypedStorage._cdata,
    )


class StorageWatch:
    """Tells when nobody holds a storage any more. It has to be closed: a finalizer would run Python code."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = storage._weak_ref()

    def expired(self) -> bool:
        """Whether nobody holds it any more."""
        if self._reference is not None and torch.UntypedStorage._expired(self._reference):
            self.close()
        return self._reference is None

    def close(self) -> None:
        """Watch no longer."""
        reference, self._reference = self._reference, None
        if reference is not None:
            torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]


set_interface()
