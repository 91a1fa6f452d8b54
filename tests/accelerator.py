"""The accelerator that tests marked `gpu` run on: CUDA, or the simulated one (`pytest --device sim`)."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any

import torch

KIND = os.environ.get("OFFLOAD_TEST_DEVICE", "cuda")
is_simulated = KIND == "sim"
if is_simulated:
    from twin import sim

    from offload.devices import accelerator as _accelerator

    LIBRARY = _accelerator.LIBRARIES["sim"] = sim.LIBRARY
else:
    LIBRARY = "libcuda.so.1"

gpu: Any = getattr(torch, KIND)  # torch.cuda, or its like


def is_available() -> bool:
    """Whether there is one to run on."""
    return bool(gpu.is_available())


def stream_handle(stream: Any = None) -> int:
    """The driver's name for a stream; the current one's where none is given."""
    stream = stream or gpu.current_stream()
    return int((stream.native_handle if is_simulated else stream.cuda_stream) or 0)


def current_context() -> int | None:
    """The driver's context of the calling thread."""
    library = ctypes.CDLL(LIBRARY)
    if is_simulated:
        library.sim_current_context.restype = ctypes.c_void_p
        found: int | None = library.sim_current_context()
        return found
    context = ctypes.c_void_p()
    assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def simulated() -> ModuleType:
    """What tests do to the simulated accelerator."""
    assert is_simulated
    return sim
