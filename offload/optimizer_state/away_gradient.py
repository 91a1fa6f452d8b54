"""A parameter's `grad` while the gradient is in the store: a tensor whose every use sees the true bytes.

`GradientMover` puts it there. An operator that only reads the gradient gets a copy from the store; the gradient stays
away. An operator that changes the gradient, or returns a view of it, brings it back into memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from offload.optimizer_state.stored_gradient import StoredGradient
from offload.torch_compat.backward_pass import current_node
from offload.torch_compat.optimizers import choose_foreach_for
from offload.torch_compat.tensors import no_torch_function, without_memory

__all__ = ["AwayGradient", "record_of"]

_aten = torch.ops.aten
_NORM = _aten.linalg_vector_norm.default
_SCALES = (_aten.mul_.Tensor, _aten.mul_.Scalar)
# On the CPU torch itself runs these for one tensor after the other.
_ONE_BY_ONE = {
    _aten._foreach_norm.Scalar: _NORM,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
}


class AwayGradient(Tensor):
    """A gradient whose bytes come from the store when they are used.

    Parameters
    ----------
    tensor
        The gradient, in memory.
    param
        Its parameter.
    record
        Holds the gradient, in memory or in the store.
    """

    record: StoredGradient
    param: weakref.ref[Tensor]

    @staticmethod
    def __new__(cls, tensor: Tensor, param: Tensor, record: StoredGradient) -> Any:
        """Make a tensor without memory."""
        return without_memory(cls, tensor, tensor.dtype, tensor.device)

    def __init__(self, tensor: Tensor, param: Tensor, record: StoredGradient) -> None:
        super().__init__()
        self.record = record
        self.param = weakref.ref(param)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator with the true bytes."""
        one = _ONE_BY_ONE.get(func)
        if one is not None and len(args) == 2 and not kwargs and all(each.device.type == "cpu" for each in args[0]):
            found = [one(each, args[1]) for each in args[0]]
            return found if one is _NORM else None
        if func is _NORM and len(args) <= 2 and not kwargs and isinstance(args[0], cls):
            order = args[1] if len(args) > 1 else 2.0
            return args[0].record.norm(order, args[0].param())
        if func in _SCALES and isinstance(args[0], cls) and args[0]._scale(func, args[1]):
            return args[0]
        brought: dict[int, AwayGradient] = {}

        def true(gradient: AwayGradient) -> Tensor:
            return gradient.read()

        def true_and_kept(gradient: AwayGradient) -> Tensor:
            tensor = gradient.bring(str(func))
            brought[id(tensor)] = gradient
            return tensor

        declared = func._schema.arguments
        changes = {each.name: each.alias_info is not None for each in declared}  # also if it returns a view
        given = [
            tree_map_only(cls, true_and_kept if about.alias_info is not None else true, each)
            for about, each in zip(declared, args, strict=False)
        ]
        named = {
            name: tree_map_only(cls, true_and_kept if changes[name] else true, each)
            for name, each in (kwargs or {}).items()
        }
        result = func(*given, **named)
        return tree_map_only(Tensor, lambda each: brought.get(id(each), each), result)

    def read(self) -> Tensor:
        """Return a tensor with the gradient's bytes. The caller must not change it."""
        return self.record.read(self.param())

    def bring(self, why: str) -> Tensor:
        """Bring the gradient into memory. It stays there, unless this is in backward: then it leaves again."""
        was_away, param = self.record.is_away, self.param()
        tensor = self.record.bring(param)
        if current_node() is None:
            if param is not None and param.grad is self:
                param.grad = tensor
            if was_away:
                self.record.place.counts.brought += 1
                self.record.place.counts.brought_by = why
        return tensor

    def _scale(self, multiply: Callable[..., Any], factor: Any) -> bool:
        """Multiply the gradient by a number, now or when it comes back. Returns False if it must come back first."""
        if current_node() is not None or isinstance(factor, AwayGradient):
            return False
        if isinstance(factor, Tensor):
            return factor.dim() == 0 and self.record.scale(multiply, factor.clone())
        return self.record.scale(multiply, factor)

    # -- ways to its memory that bypass the dispatcher ----------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """The gradient, brought into memory."""
        return self.bring("data").data

    @data.setter
    def data(self, tensor: Tensor) -> None:
        param = self.param()
        if param is not None and param.grad is self:
            param.grad = tensor
        self.record.keep(tensor)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.read())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.read().clone(memory_format=torch.preserve_format))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _in_memory(name: str) -> Callable[..., Any]:
    def call(self: AwayGradient, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.bring(name), name)(*args, **kwargs)

    return call


for _name in ("__array__", "__dlpack__", "data_ptr", "is_shared", "numpy", "share_memory_", "storage", "tolist",
              "untyped_storage"):  # fmt: skip
    setattr(AwayGradient, _name, _in_memory(_name))

# With another choice of kernels, torch's functions that clip gradients would give other bits.
choose_foreach_for(AwayGradient)


def record_of(param: Tensor) -> StoredGradient | None:
    """Return the record of a parameter's gradient; None if the parameter's `grad` is not an `AwayGradient`."""
    gradient = param.grad
    return gradient.record if isinstance(gradient, AwayGradient) else None
