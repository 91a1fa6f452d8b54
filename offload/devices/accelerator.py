"""An accelerator as a device: CUDA, and what is driven like it.

Beside the data path; `device.py` says what each method is for. Everything goes through torch's module for the
kind of device (`torch.cuda` is one): what modules spell differently is settled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload import _core
from offload.torch_compat.memory import observe_out_of_memory
from offload.torch_compat.streams import raw_current_stream

# Kinds of devices, and the library with their driver's interface. A new kind is a line here.
LIBRARIES = {"cuda": "libcuda.so.1"}


def module_of(kind: str) -> Any:
    """Torch's module for a kind of device; None where this torch has none."""
    return getattr(torch, kind, None)


def driven_devices() -> int:
    """Devices that the drivers know, of every kind."""
    return sum(_core.cuda_device_count(library) for library in LIBRARIES.values())


def watch_out_of_memory(call: Callable[[torch.device, int], None]) -> bool:
    """Have `call` told of every refusal, with the bytes that were asked for, before anything unwinds.

    False where nobody will: torch has this for CUDA alone.
    """
    if not torch.cuda.is_available():
        return False

    def refused(ordinal: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        call(torch.device("cuda", ordinal), asked_bytes)

    return observe_out_of_memory(refused)


class Accelerator:
    """One device of a kind, and torch's module for it."""

    is_accelerator = True
    in_flight_bytes_max = 512 << 20

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.module = torch.get_device_module(device)
        self._stream: tuple[int, Any] | None = None  # the latest current one, by its handle: an object costs more
        self._raw_stream = raw_current_stream(device.type) if device.index is not None else None

    def current_stream(self) -> int:
        """Driver's handle of the current stream."""
        if self._raw_stream is not None:
            return int(self._raw_stream(self.torch_device.index))
        stream = self.module.current_stream(self.torch_device)
        handle = getattr(stream, "cuda_stream", None)
        return int((stream.native_handle if handle is None else handle) or 0)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Torch's `record_stream`: nothing where the block is the current stream's own."""
        handle = self.current_stream()
        if self._stream is None or handle != self._stream[0]:
            self._stream = (handle, self.module.current_stream(self.torch_device))
        tensor.record_stream(self._stream[1])

    def mark(self) -> Any:
        """An event that was recorded."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(self.torch_device))
        return event

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """As the device measures them."""
        if not all(mark.query() for mark in marks):
            return None
        return [first.elapsed_time(mark) / 1e3 for mark in marks]

    def synchronize(self) -> None:
        """All of its streams."""
        self.module.synchronize(self.torch_device)

    def total_bytes(self) -> int:
        """As its properties say."""
        return int(self.module.get_device_properties(self.torch_device).total_memory)

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free, and all, of all processes."""
        free, total = self.module.mem_get_info(self.torch_device)
        return int(free), int(total)

    def memory_stats(self) -> dict[str, Any]:
        """What torch's allocator counts, flat."""
        return dict(self.module.memory_stats(self.torch_device))

    def allocated_bytes(self) -> int:
        """In tensors."""
        nested = getattr(self.module, "memory_stats_as_nested_dict", None)
        if nested is None:
            return int(self.module.memory_allocated(self.torch_device))
        stats = nested(self.torch_device)  # memory_allocated flattens all of it first
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def peak_bytes(self) -> int:
        """In tensors."""
        return int(self.module.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Torch's statistic, for everybody."""
        self.module.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Memory that torch's allocator keeps and nothing uses goes back to the system."""
        self.module.empty_cache()

    def name(self) -> str:
        """From its properties."""
        return str(self.module.get_device_name(self.torch_device))

    def uuid(self) -> str:
        """From its properties."""
        return str(getattr(self.module.get_device_properties(self.torch_device), "uuid", ""))

    def driver(self) -> _core.Driver:
        """Over the library of its kind."""
        return _core.cuda_driver(self.torch_device.index or 0, LIBRARIES[self.torch_device.type])
