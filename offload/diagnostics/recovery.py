"""Frees the memory that a failed step still holds, after an out-of-memory error in a notebook.

Models stay enabled.
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from typing import Any

import torch

from offload.devices import allocator
from offload.devices.device import accelerators
from offload.devices.memory import memory_of
from offload.runtime.stores import engines
from offload.runtime.weak import run_pending_callbacks

__all__ = ["recover"]

log = logging.getLogger("offload")


def recover() -> dict[str, int]:
    """Free the memory that the last exception keeps alive, so that the next cell can run.

    A notebook keeps the last exception; its traceback keeps every frame, and the frames keep the step's tensors. This
    function drops that exception, collects garbage, waits for copies under way and empties the caches of torch and of
    every enabled engine. Models stay enabled. Tensors in variables of the notebook are not freed.

    Returns
    -------
    dict of str to int
        Freed bytes by device: ``"cpu"`` and, if CUDA is in use, ``"cuda:0"`` and so on.

    Examples
    --------
    >>> import offload
    >>> freed = offload.recover()
    >>> freed["cpu"] >= 0
    True
    """
    in_use = accelerators(in_use=True)
    devices = [torch.device("cpu"), *(accelerator.torch_device for accelerator in in_use)]
    before = {str(device): _held(device) for device in devices}
    _forget_exceptions()
    gc.collect()
    run_pending_callbacks()
    for engine in engines():
        engine.drain()
        engine.store.trim()
    for accelerator in in_use:
        accelerator.release_cached()
    allocator.release_free_memory()
    freed = {str(device): max(before[str(device)] - _held(device), 0) for device in devices}
    log.info("freed %s", ", ".join(f"{nbytes} bytes of {name}" for name, nbytes in freed.items()))
    return freed


def _held(device: torch.device) -> int:
    memory = memory_of(device)
    return memory.reserved_bytes if memory.is_accelerator else memory.used_bytes


def _forget_exceptions() -> None:
    """Drop the interpreter's and IPython's references to the last exception, and clear its frames."""
    kept = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "InteractiveTB"):
        shell.InteractiveTB.tb = None
    seen: set[int] = set()
    while kept:
        error = kept.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        kept += [error.__cause__, error.__context__]
