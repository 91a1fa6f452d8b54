"""Lets `load_state_dict` convert the state of a checkpoint one parameter after the other.

Torch converts each tensor of a checkpoint to the device and dtype of its parameter, all of them before the first
post-hook runs. So all converted state would be in memory at the same time. A pre-hook therefore replaces each tensor
that would be copied by a stand-in, which torch leaves unconverted. The tensor is converted when its parameter's state
is about to be swapped out or used.

Other hooks of `load_state_dict` that run in between see these tensors with the checkpoint's device and dtype. The
stand-in of a DTensor passes attributes, methods and operators on to the DTensor, but `isinstance(x, DTensor)` is False.
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


class _StandIn(Tensor):
    """A stand-in for a tensor of a checkpoint. Called by `load_state_dict`, `to` returns the stand-in.

    Attributes
    ----------
    loaded
        The tensor of the checkpoint, with which operators compute. It may be a DTensor.
    """

    loaded: Tensor

    @staticmethod
    def of(loaded: Tensor) -> _StandIn:
        """Return a stand-in for a tensor, without a copy."""
        made: _StandIn = local_of(loaded).as_subclass(_StandIn)
        made.loaded = loaded
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the tensors of the checkpoint."""
        args, kwargs = tree_map_only(_StandIn, lambda each: each.loaded, (args, kwargs or {}))
        with without_torch_function():  # pytree has not replaced stand-ins in containers that it does not know
            return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only a DTensor has."""
        if name == "loaded":  # not set yet
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.loaded, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.loaded.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the tensor of the checkpoint. Called by `Optimizer.load_state_dict`, return the stand-in."""
        return self if is_called_by_load_state_dict() else self.loaded.to(*args, **kwargs)


class _Mover(Protocol):
    """The part of `StateMover` that `defer` uses."""

    @property
    def rests(self) -> bool:
        """Whether this optimizer swaps out no state."""


def defer(mover: _Mover, min_nbytes: int, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return a state dict in which a stand-in replaces each large tensor that torch would copy.

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
        key: {name: _with_stand_in(params[key], name, value, min_nbytes) for name, value in values.items()}
        if key in params and isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _with_stand_in(param: Tensor, name: Any, value: Any, min_nbytes: int) -> Any:
    local = local_of(value)
    if not has_storage(local) or not has_storage(local_of(param)) or name == "step":
        return value
    is_as_torch_wants = value.device == param.device and value.dtype == _dtype(param, value)
    return value if local.nbytes < min_nbytes or is_as_torch_wants else _StandIn.of(value)


def _dtype(param: Tensor, value: Tensor) -> torch.dtype:
    """Return the dtype to which torch converts state."""
    return param.dtype if param.is_floating_point() else value.dtype


def convert(param: Tensor, state: Any) -> None:
    """Convert the tensors that stand-ins replace in one parameter's state; ignores what is no dictionary."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if type(value) is _StandIn:
            state[name] = value.loaded.to(param.device, _dtype(param, value.loaded))
