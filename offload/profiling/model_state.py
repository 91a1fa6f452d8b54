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
    """Bytes in use on the device before a step begins."""

    state: int  # parameters, buffers, optimizer state; on CUDA everything but gradients
    gradients: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.state + self.gradients


_listeners: WeakReferences[HeldMemory] = WeakReferences()
_hooks: list[RemovableHandle] = []


def _listen(listener: HeldMemory) -> None:
    """Call `listener.optimizer_steps` before every optimizer step in this process.

    One hook serves all listeners and is never removed. Torch iterates over a dictionary of hooks; if a hook were
    removed meanwhile, because its model is freed, the optimizer that is stepping would raise an error.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_tell))
    _listeners.add(listener)


def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    run_pending_callbacks()
    for each in _listeners:
        each.optimizer_steps(optimizer)


class HeldMemory:
    """Measures the memory that one model and the optimizers of its parameters use before a step."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._optimizers: WeakReferences[torch.optim.Optimizer] = WeakReferences()
        self._before_step: Callable[[], None] | None = None
        self._is_closed = False
        _listen(self)

    def on_optimizer_step(self, call: Callable[[], None]) -> None:
        """Call a bound method before any optimizer step. At that time backward is over."""
        self._before_step = weak_callback(call)

    def close(self) -> None:
        """Ignore further optimizer steps."""
        self._is_closed = True

    def look(self) -> HeldBytes:
        """Return the bytes in use now.

        On an accelerator: all that torch has allocated. On the CPU: the model's parameters, buffers and gradients, the
        states of its known optimizers, and the engine's resident bytes.
        """
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
        """Record an optimizer that is about to step, if it steps parameters of the model."""
        if self._is_closed:
            return
        if self._before_step is not None:
            self._before_step()
        self._engine.collect()  # backward is over: free what its graph held before the optimizer needs memory
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
