"""Finds a module's parameters and buffers faster than torch's public iterators.

They are needed at the beginning of every step. The public iterators build a name for each tensor and visit each module
several times, which takes milliseconds for a deep model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["gradients_of", "is_sharded", "own_parameters", "scripted_parameters", "state_tensors", "walk"]

_SHARDED = frozenset(("FSDPModule", "FullyShardedDataParallel"))


def state_tensors(model: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the parameters and buffers of a module and its submodules, each once."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    pending: list[nn.Module] = [model]
    seen = {id(model)}
    while pending:
        module = pending.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return list(parameters.values()), list(buffers.values())


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one.

    `functional_call` may use the result of an operator as a parameter. It has no gradient, and torch warns if that is
    read.
    """
    return [each.grad for each in parameters if each.is_leaf and each.grad is not None]


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model or a module inside it is sharded by FSDP: its parameters are gathered for each call."""
    kinds = {type(part) for part in walk(model)}
    return any(kind.__name__ in _SHARDED for part in kinds for kind in part.__mro__)


def walk(model: nn.Module) -> list[nn.Module]:
    """Return the module and its submodules, each once. `modules` takes five times as long: every forward asks."""
    found = [model]
    seen = {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def scripted_parameters(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Return the identities of parameters of TorchScript modules, whose parts are called from C++."""
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    return frozenset(id(parameter) for module in scripted for parameter in own_parameters(module))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module has itself, without those of its submodules."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]
