"""Bytes on the device before a step begins: parameters, gradients, and the state of the optimizers that step them.

The planner adds them to what a profiled step allocates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload.devices.device import device_of
from offload.runtime.engine import Engine, has_storage
from offload.runtime.weak import WeakReferences, run_pending_callbacks, weak_callback
from offload.torch_compat.modules import state_tensors

__all__ = ["HeldBytes", "HeldMemory"]


@dataclass(frozen=True)
class HeldBytes:
    """What is on the device before a step begins, in bytes."""

    state: int  # parameters, buffers, optimizer state; on CUDA everything but gradients
    gradients: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.gradients


_listeners: WeakReferences[HeldMemory] = WeakReferences()
_hooks: list[RemovableHandle] = []


def _listen(listener: HeldMemory) -> None:
    """Have `listener` told of every optimizer's step.

    By one hook of the process, for good: torch iterates over its hooks, and one that goes meanwhile, as its model does,
    is an error of whichever optimizer is stepping.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_tell))
    _listeners.add(listener)


def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    run_pending_callbacks()
    for each in _listeners:
        each.optimizer_steps(optimizer)


class HeldMemory:
    """Looks at one model and at the optimizers that were seen to step its parameters."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._optimizers: WeakReferences[torch.optim.Optimizer] = WeakReferences()
        self._before_step: Callable[[], None] | None = None
        self._is_closed = False
        _listen(self)

    def on_optimizer_step(self, call: Callable[[], None]) -> None:
        """Have a bound method called before any optimizer steps: backward is over then."""
        self._before_step = weak_callback(call)

    def close(self) -> None:
        """Listen to optimizers no longer."""
        self._is_closed = True

    def look(self) -> HeldBytes:
        """What is there now: on an accelerator all that torch has allocated, else what is known of the model."""
        model = self._model()
        parameters, buffers = state_tensors(model) if model is not None else ([], [])
        gradients = _bytes_of(parameter.grad for parameter in parameters)
        device = device_of(self._engine.device)
        if device.is_accelerator:
            return HeldBytes(device.allocated_bytes() - gradients, gradients)
        states = [leaf for each in self._optimizers for leaf in tree_leaves(list(each.state.values()))]
        states = [leaf for leaf in states if isinstance(leaf, Tensor)]  # LBFGS keeps lists of them
        return HeldBytes(_bytes_of([*parameters, *buffers, *states]) + self._engine.resident.now, gradients)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that is about to step."""
        if self._is_closed:
            return
        if self._before_step is not None:
            self._before_step()
        self._engine.collect()  # backward is over: what its graph held goes before the optimizer needs memory
        if any(each is optimizer for each in self._optimizers):
            return
        model = self._model()
        own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.add(optimizer)


def _bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    plain = [tensor for tensor in tensors if tensor is not None and has_storage(tensor)]
    return sum({Engine.identity(tensor): tensor.untyped_storage().nbytes() for tensor in plain}.values())
