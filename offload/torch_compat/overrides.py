"""What a subclass of `Parameter` needs to see each access to it: torch's override of functions, by private names.

`parameters` uses it. Reads of what belongs to the object or its shape are told apart from those of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

__all__ = [
    "GIVES_ADDRESS",
    "GIVES_MEMORY",
    "OF_THE_LAYOUT",
    "OF_THE_OBJECT",
    "SETS_DATA",
    "USES_THE_GRAPH",
    "WITHOUT_GRAPH",
    "alias_of",
    "call_without_overrides",
    "requires_grad_of",
    "set_data",
    "storage_of",
    "unseen",
    "version_of_object",
    "writes_without_version",
]

Result = TypeVar("Result")

# (function, types, arguments, keyword arguments): calls a function that takes a subclass for a plain tensor. It is one
# call into C: no signal handler runs while overrides are off, unless the function itself is written in Python.
call_without_overrides: Callable[..., Any] = torch._C._disabled_torch_function_impl


def storage_of(parameter: Tensor) -> UntypedStorage:
    """Return the storage that a parameter of any class has now."""
    found: UntypedStorage = call_without_overrides(Tensor.untyped_storage, (), (parameter,))
    return found


def alias_of(parameter: Tensor) -> Tensor:
    """Return a plain tensor with the same memory and the same version counter."""
    found: Tensor = call_without_overrides(Tensor.detach, (), (parameter,))
    return found


def set_data(parameter: Tensor, data: Tensor) -> None:
    """As `parameter.data = data`."""
    call_without_overrides(SETS_DATA, (), (parameter, data))


def version_of_object(parameter: Tensor) -> int:
    """How often a parameter, or a view of the same memory, was changed in place."""
    found: int = call_without_overrides(_VERSION, (), (parameter,))
    return found


def requires_grad_of(parameter: Tensor) -> bool:
    """Whether it is trained."""
    found: bool = call_without_overrides(_REQUIRES_GRAD, (), (parameter,))
    return found


def unseen(function: Callable[..., Result], *args: object) -> Result:
    """Call a function whose operators no mode or transform of the program sees. It makes no inference tensors."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch(), torch._C._InferenceMode(False):
        return function(*args)


def writes_without_version(function: Any) -> bool:
    """Whether a function may write to its arguments without changing their versions: optimizers' fused kernels do."""
    return str(getattr(function, "__name__", "")).startswith("_fused_")


def _gets(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}


_GRAD: Any = Tensor.grad

# Functions that read no bytes and return the same for a parameter whose bytes are away.
OF_THE_OBJECT = frozenset(
    _gets("device", "dtype", "shape", "layout", "ndim", "itemsize", "nbytes", "names")
    | _gets(*(name for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))))
    | _gets("grad", "grad_fn", "requires_grad", "retains_grad", "output_nr", "_version", "_base", "_backward_hooks")
    | _gets("_post_accumulate_grad_hooks", "_cdata", "_grad", "grad_dtype")
    | {_GRAD.__set__, _GRAD.__delete__, torch._has_compatible_shallow_copy_type}
    | _methods(
        "dim", "size", "numel", "nelement", "element_size", "get_device", "__len__", "is_inference", "is_complex"
    )
    | _methods("is_floating_point", "is_signed", "is_conj", "is_neg", "_is_view", "_is_zerotensor", "ndimension")
)

# Functions that return strides or offsets. A parameter whose bytes are away has other ones.
OF_THE_LAYOUT = frozenset(_methods("stride", "is_contiguous", "storage_offset", "dim_order"))

# Functions whose results are in no graph.
WITHOUT_GRAPH = frozenset(_gets("data") | {Tensor.detach})

# Functions that use or change a tensor's place in the graph, also while gradients are disabled.
USES_THE_GRAPH = frozenset(
    {torch.autograd.grad, torch.autograd.backward}
    | _methods("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
)

# Functions that return memory through which the program can write without a change of the version counter.
GIVES_MEMORY = frozenset(
    _gets("data", "__cuda_array_interface__", "__array_interface__")
    | _methods("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "share_memory_")
    | _methods("data_ptr", "const_data_ptr", "mutable_data_ptr", "set_", "resize_", "__setstate__", "detach")
    | {Tensor.data.__set__}  # type: ignore[attr-defined]
)

# Those of them that return an address, which keeps no tensor alive.
GIVES_ADDRESS = frozenset(
    _methods("data_ptr", "const_data_ptr", "mutable_data_ptr") | _gets("__cuda_array_interface__")
)

SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
