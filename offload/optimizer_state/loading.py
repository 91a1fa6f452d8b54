"""Lets `load_state_dict` convert the state of a checkpoint one parameter after the other.

Torch converts every tensor to the device and dtype of its parameter before a hook may move any of them. A pre-hook
therefore wraps the tensors that would be copied, so that torch does not convert them. Each is converted when its
parameter's state is about to leave memory or to be used.

Other hooks of `load_state_dict` that run in between see these tensors with the checkpoint's device and dtype. What
stands for a DTensor has its methods and attributes, and operators compute with the DTensor, but it is no instance of
DTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from offload.runtime.engine import has_storage
from offload.torch_compat.optimizers import is_called_by_load_state_dict
from offload.torch_compat.tensors import local_of, without_torch_function

__all__ = ["convert", "defer"]


class _Unconverted(Tensor):
    """Stands for a tensor of a checkpoint while torch converts loaded state: `to` returns it as it is.

    Operators compute with the tensor itself.

    Attributes
    ----------
    loaded
        The tensor itself. It may be a DTensor.
    """

    loaded: Tensor

    @staticmethod
    def of(loaded: Tensor) -> _Unconverted:
        """Return what stands for a tensor, without a copy."""
        made: _Unconverted = local_of(loaded).as_subclass(_Unconverted)
        made.loaded = loaded
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the tensors themselves."""
        args, kwargs = tree_map_only(_Unconverted, lambda each: each.loaded, (args, kwargs or {}))
        with without_torch_function():  # in a list of another class, stand-ins are left
            return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what only a DTensor has."""
        if name == "loaded":  # not set yet
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.loaded, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.loaded.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the tensor, unless `Optimizer.load_state_dict` is the caller."""
        return self if is_called_by_load_state_dict() else self.loaded.to(*args, **kwargs)


class _Mover(Protocol):
    """The part of `StateMover` that `defer` uses."""

    @property
    def rests(self) -> bool:
        """Whether no state is to leave memory."""


def defer(mover: _Mover, min_nbytes: int, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state dict to load, with the large tensors that torch would copy unconverted.

    Parameters
    ----------
    mover
        If it rests, the result is None, and the given state dict is loaded.
    min_nbytes
        Smaller tensors are converted by torch.
    """
    if mover.rests:
        return None
    loaded, own = (
        list(chain.from_iterable(group["params"] for group in groups))
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    params = dict(zip(loaded, own, strict=False))  # of different lengths: torch raises an error
    state = {
        key: {name: _deferred(params[key], name, value, min_nbytes) for name, value in values.items()}
        if key in params and isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _deferred(param: Tensor, name: Any, value: Any, min_nbytes: int) -> Any:
    local = local_of(value)
    if not has_storage(local) or not has_storage(local_of(param)) or name == "step":
        return value
    is_as_torch_wants = value.device == param.device and value.dtype == _dtype(param, value)
    return value if local.nbytes < min_nbytes or is_as_torch_wants else _Unconverted.of(value)


def _dtype(param: Tensor, value: Tensor) -> torch.dtype:
    """Return the dtype to which torch converts state."""
    return param.dtype if param.is_floating_point() else value.dtype


def convert(param: Tensor, state: Any) -> None:
    """Convert the unconverted tensors of one parameter's state. Does nothing if `state` is not a dictionary."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if type(value) is _Unconverted:
            state[name] = value.loaded.to(param.device, _dtype(param, value.loaded))
