"""Finds a module's parameters and buffers faster than torch's public iterators.

They are needed at the beginning of every step. The public iterators build a name for each tensor and visit each module
several times, which takes milliseconds for a deep model.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["is_sharded", "state_tensors"]

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


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model or a module inside it is sharded by FSDP: its parameters are gathered for each call."""
    return any(kind.__name__ in _SHARDED for part in model.modules() for kind in type(part).__mro__)
