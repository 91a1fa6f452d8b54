"""Modules whose kernels write into a tensor that autograd has just saved.

Torch saves the arguments of an operator before its kernel runs. Two kernels then write into such an argument, and its
version does not show it: that of RReLU writes the noise, that of InstanceNorm the running statistics, which it has
repeated for each sample. A copy that begins when the tensor is saved has other bytes. So while such a module runs,
tensors without history are kept.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

__all__ = ["begin_forward", "is_writing", "watch"]


class _Depth(threading.local):
    depth = 0  # number of such modules whose forward runs in this thread


_running = _Depth()


def watch(model: nn.Module) -> list[RemovableHandle]:
    """Install hooks on the model's modules of this kind. Returns what removes them; empty if there are none."""
    found = [module for module in model.modules() if _writes(module)]
    handles = [module.register_forward_pre_hook(_enter, prepend=True) for module in found]
    return handles + [module.register_forward_hook(_leave, always_call=True) for module in found]


def is_writing() -> bool:
    """Return whether a module of this kind runs in this thread."""
    return _running.depth > 0


def begin_forward() -> None:
    """Note that a forward pass begins in this thread: an interrupt may have kept the last one from ending."""
    _running.depth = 0


def _writes(module: nn.Module) -> bool:
    return isinstance(module, nn.RReLU) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def _enter(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():  # compiled code saves what its kernels have written
        _running.depth += 1


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.depth = max(0, _running.depth - 1)  # torch calls this hook even if it has not called `_enter`
