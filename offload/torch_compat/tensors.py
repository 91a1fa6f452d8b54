"""Properties of a tensor that torch exposes only in private interfaces.

Hooks use them at every pack of a tensor that may be swapped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Parameter

from offload import _core
from offload._core import StorageWatch
from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.borrowed_memory import storage_over

__all__ = [
    "StorageWatch",
    "forbid_writes",
    "has_default_strides",
    "has_own_bytes",
    "is_local_held",
    "is_read_lazily",
    "local_of",
    "no_torch_function",
    "raise_changed",
    "set_interface",
    "shapes_in_nested",
    "sharded_like",
    "storage_identity",
    "version_of",
    "without_memory",
    "without_torch_function",
]

# From now on, a request for a writable address of this tensor's memory raises an error; None if this torch cannot
# do that.
forbid_writes: Callable[[torch.Tensor], None] | None = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
# Returns the version: how often a tensor, or a view of the same memory, was changed in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# Returns the identity of a storage, unique among live storages.
storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# Returns a weak reference to a tensor, which reserves its address.
weak_reference: Callable[[torch.Tensor], object] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
# The `__torch_function__` of a class whose operators all reach `__torch_dispatch__`.
no_torch_function: Any = torch._C._disabled_torch_function_impl
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass  # a context manager
# Return a view that is conjugated or negated lazily.
conjugated: Callable[[torch.Tensor], torch.Tensor] = torch._conj
negated: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view


# Returns whether a tensor is wrapped by functorch.
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def has_default_strides(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the strides of a new tensor of its shape.

    `is_contiguous` ignores the strides of dimensions of size 1.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has bytes of its own, and a shape.

    A tensor that functorch wraps and a zero tensor without memory have no bytes. A nested tensor has no shape, or one
    with a symbol in it.
    """
    return not (tensor._is_zerotensor() or _is_wrapped(tensor) or tensor.is_nested)


def is_read_lazily(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is conjugated or negated when it is read, so that its memory has other values."""
    return tensor.is_conj() or tensor.is_neg()


def shapes_in_nested(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Return what a step with a nested tensor depends on: the shapes of its components.

    If it is jagged: the shapes of its packed values and offsets, and the length of its longest component as one more
    shape, unless reading it would have to wait for the device. (The shape of a jagged tensor has a symbol in it that is
    new in every tensor.) It is read without operators of autograd, which inference tensors do not allow.
    """
    nested: Any = tensor
    if tensor.layout != torch.jagged:
        return [tuple(sizes) for sizes in nested._nested_tensor_size().tolist()]
    values, offsets = nested._values, nested._offsets
    longest = getattr(nested, "_maybe_max_seqlen", None)
    if longest is None and offsets.device.type == "cpu":
        longest = int(offsets.diff().max()) if offsets.numel() > 1 else 0
    return [tuple(values.shape), tuple(offsets.shape), *([] if longest is None else [(longest,)])]


@cache
def _is_dtensor(kind: type) -> bool:
    """Return whether a class is torch's DTensor itself; importing it to compare with takes long."""
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def local_of(value: Any) -> Any:
    """Return the tensor in a DTensor that has this process's values; any other value as it is, subclasses too."""
    kind: Any = type(value)
    return value._local_tensor if _is_dtensor(kind) else value


def is_local_held(value: torch.Tensor) -> bool:
    """Return whether other code than a DTensor holds its local tensor; False for any other tensor."""
    if not _is_dtensor(type(value)):
        return False
    local = local_of(value)
    return sys.getrefcount(local) > _HELD_BY_DTENSOR


_HELD_BY_DTENSOR = 3  # the attribute, the variable and the argument of getrefcount


def sharded_like(value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of a local tensor: it makes a DTensor like `value`, or returns it if `value` is no DTensor.

    The function does not hold `value`.
    """
    kind: Any = type(value)
    if not _is_dtensor(kind):
        return lambda local: local
    how = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return partial(kind.from_local, device_mesh=value.device_mesh, placements=value.placements, **how)


def without_memory(kind: type[torch.Tensor], like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Return an object of a subclass of `torch.Tensor` with a tensor's shape and strides, which has no memory.

    C++ code that asks for the address of its memory gets an error instead of a null pointer.
    """
    wrap: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    made = wrap(kind, like.shape, strides=like.stride(), dtype=dtype, device=device)
    if forbid_writes is not None:
        forbid_writes(made)
    return made


def raise_changed(kind: str, shape: tuple[int, ...], found: int, expected: int) -> None:
    """Raise the error that autograd raises without hooks if a saved tensor was changed in place.

    Autograd names the operation that returned the tensor. Hooks are not told; they know which node needs it.
    """
    node = current_node()
    needed = f", which {node.name()} needs," if node is not None else ""
    hint = (
        "the backtrace further above shows the operation that failed to compute its gradient. The tensor was changed "
        "in there or later."
        if torch.is_anomaly_enabled()
        else "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}]{needed} is at version {found}; expected version {expected} instead. Hint: {hint}"
    )


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _holders_alone(holders: Callable[[int], int] | None) -> int:
    """Return the value of `holders` for a storage that one tensor holds, when called as the extension does."""
    tensor = torch.empty(1)
    identity = tensor.untyped_storage()._cdata  # the storage's Python object is freed here, as in the extension
    return holders(identity) if holders is not None else 0


def set_interface(*, dlpack: bool = True) -> bool:
    """Give the extension the attributes of torch's classes that hooks use, so that it need not look them up.

    Parameters
    ----------
    dlpack
        Whether to exchange tensors through DLPack's C interface, if torch has it.

    Returns
    -------
    bool
        Whether DLPack's C interface is used.
    """
    holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
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
        data=torch.Tensor.data,
        device=torch.Tensor.device,
        gradient=torch.Tensor.grad,
        requires_grad=torch.Tensor.requires_grad,
        out_of_memory=(torch.OutOfMemoryError, MemoryError),
        dtype=torch.Tensor.dtype,
        itemsize=torch.Tensor.itemsize,
        shape=torch.Tensor.shape,
        untyped_storage=torch.Tensor.untyped_storage,
        stride=torch.Tensor.stride,
        storage_offset=torch.Tensor.storage_offset,
        is_conj=torch.Tensor.is_conj,
        is_neg=torch.Tensor.is_neg,
        is_inference=torch.Tensor.is_inference,
        conjugated=conjugated,
        negated=negated,
        type_name=torch.Tensor.type,
        set_storage=torch.Tensor.set_,
        storage_address=torch.UntypedStorage.data_ptr,
        storage_holders=holders,
        holders_alone=_holders_alone(holders),
        storage_of_buffer=storage_over,
        watch_storage=torch.UntypedStorage._weak_ref,
        storage_is_gone=torch.UntypedStorage._expired,
        unwatch_storage=torch.UntypedStorage._free_weak_ref,
        watched_storage=torch.UntypedStorage._new_with_weak_ptr,
        empty=_empty,
        raise_changed=raise_changed,
        storage_nbytes=torch.UntypedStorage.nbytes,
        storage_identity=torch.UntypedStorage._cdata,
    )
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return _core.set_dlpack(api if dlpack else None)


set_interface()
