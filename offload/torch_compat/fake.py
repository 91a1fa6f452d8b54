"""Tensors with shape and type but without data, and the floating-point operations of an operator on them.

`offload fit` counts with them what a step needs that cannot run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils.flop_counter import flop_registry

__all__ = ["NEEDS_VALUES", "Fakes", "converted_in_place", "flops_of", "is_fake"]

# Raised where a program reads values of a tensor that has none.
NEEDS_VALUES: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)

_ATEN = torch.ops.aten
# Attention on the CPU, which torch does not count, does the operations of that on a GPU.
_SAME = {
    f"_scaled_dot_product_flash_attention_for_cpu{end}": f"_scaled_dot_product_flash_attention{end}"
    for end in ("", "_backward")
}
_FLOPS: Mapping[Any, Any] = {
    **flop_registry,
    **{
        getattr(_ATEN, name): flop_registry[getattr(_ATEN, same)]
        for name, same in _SAME.items()
        if hasattr(_ATEN, name) and getattr(_ATEN, same) in flop_registry
    },
}


class Fakes:
    """Makes tensors without data. Operators on one of them, and on tensors with data beside it, return such tensors."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor without data of the same shape, strides and type, on the CPU."""
        with self._mode, torch.no_grad():
            made: Tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


@contextmanager
def converted_in_place() -> Iterator[None]:
    """Within, `model.to`, `half` and the like convert parameters without data as torch does those with data.

    For a `FakeTensor`, torch exchanges two tensors instead of setting `data`: it refuses tensors that its own mode
    refers to, or a graph, and hooks and attributes would leave the parameter.
    """
    plain: Any = torch.utils.swap_tensors

    def converted(tensor: Tensor, into: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and isinstance(into, FakeTensor):
            tensor.data, tensor.fake_device = into, into.fake_device
        else:
            plain(tensor, into)

    torch.utils.swap_tensors = converted
    try:
        yield
    finally:
        torch.utils.swap_tensors = plain


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the floating-point operations of a call of an operator: of matrix products, convolutions and attention."""
    count = _FLOPS.get(operator._overloadpacket)
    return int(count(*args, **kwargs, out_val=output)) if count is not None else 0
