"""An accelerator as a device: CUDA, and other kinds of devices whose driver has the same interface.

`device.py` has the contract of each method. All calls go through torch's module for the kind of device, such as
`torch.cuda`; differences between these modules are handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload import _core
from offload.torch_compat.memory import observe_out_of_memory
from offload.torch_compat.streams import raw_current_stream

# For each kind of device, the library of its driver. A new kind takes one line here.
LIBRARIES = {"cuda": "libcuda.so.1"}


def module_of(kind: str) -> Any:
    """Return torch's module for a kind of device; None if this torch has none."""
    return getattr(torch, kind, None)


def driven_devices() -> int:
    """Return the number of devices that the drivers report, of all kinds."""
    return sum(_core.cuda_device_count(library) for library in LIBRARIES.values())


def watch_out_of_memory(call: Callable[[torch.device, int], None]) -> bool:
    """Register `call`, to be called with device and requested bytes when torch runs out of a GPU's memory.

    The call comes before the error is raised. Returns False if this torch was built for the CPU only.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return False

    def refused(ordinal: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        call(torch.device("cuda", ordinal), asked_bytes)

    torch.cuda.init()  # type: ignore[no-untyped-call]  # before, there is no allocator that could be observed
    observe_out_of_memory(refused)
    return True


class Accelerator:
    """An accelerator, and torch's module for its kind."""

    is_accelerator = True
    in_flight_bytes_max = 512 << 20

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.module = torch.get_device_module(device)
        self._stream: tuple[int, Any] | None = None  # last current stream: handle and object, which is slow to make
        self._raw_stream = raw_current_stream(device.type) if device.index is not None else None

    def current_stream(self) -> int:
        """Return the driver's handle of the current stream."""
        if self._raw_stream is not None:
            return int(self._raw_stream(self.torch_device.index))
        stream = self.module.current_stream(self.torch_device)
        handle = getattr(stream, "cuda_stream", None)
        return int((stream.native_handle if handle is None else handle) or 0)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Call torch's `record_stream`, which does nothing if the block was allocated on the current stream."""
        handle = self.current_stream()
        if self._stream is None or handle != self._stream[0]:
            self._stream = (handle, self.module.current_stream(self.torch_device))
        tensor.record_stream(self._stream[1])

    def mark(self) -> Any:
        """Return an event that has been recorded on the current stream."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(self.torch_device))
        return event

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Return the seconds that the device measured between the events."""
        if not all(mark.query() for mark in marks):
            return None
        return [first.elapsed_time(mark) / 1e3 for mark in marks]

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.module.synchronize(self.torch_device)

    def total_bytes(self) -> int:
        """Return the total memory from the device's properties."""
        return int(self.module.get_device_properties(self.torch_device).total_memory)

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes and the total bytes of the device; memory of all processes counts as used."""
        free, total = self.module.mem_get_info(self.torch_device)
        return int(free), int(total)

    def free_bytes(self) -> int:
        """Return how many bytes torch's allocator can still reserve, within the fraction that this process may use."""
        free, total = self.memory_info()
        fraction_of = getattr(self.module, "get_per_process_memory_fraction", None)
        if fraction_of is None:
            return free
        reserved = int(self.memory_stats().get("reserved_bytes.all.current", 0))
        return max(0, min(free, int(fraction_of(self.torch_device) * total) - reserved))

    def memory_stats(self) -> dict[str, Any]:
        """Return the statistics of torch's allocator as a flat dict."""
        return dict(self.module.memory_stats(self.torch_device))

    def allocated_bytes(self) -> int:
        """Return the bytes that torch's allocator has allocated to tensors."""
        return self._allocated("current")

    def peak_bytes(self) -> int:
        """Return the maximum of the bytes allocated to tensors."""
        return self._allocated("peak")

    def _allocated(self, figure: str) -> int:
        nested = getattr(self.module, "memory_stats_as_nested_dict", None)
        if nested is None:
            whole = self.module.memory_allocated if figure == "current" else self.module.max_memory_allocated
            return int(whole(self.torch_device))
        stats = nested(self.torch_device)  # faster: memory_allocated flattens all statistics first
        return int(stats["allocated_bytes"]["all"][figure]) if stats else 0

    def reset_peak(self) -> None:
        """Reset torch's own statistic, for all its users."""
        self.module.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Return unused cached memory of torch's allocator to the system."""
        self.module.empty_cache()

    def name(self) -> str:
        """Return the name of the device."""
        return str(self.module.get_device_name(self.torch_device))

    def uuid(self) -> str:
        """Return the UUID from the device's properties."""
        return str(getattr(self.module.get_device_properties(self.torch_device), "uuid", ""))

    def random_state(self) -> torch.Tensor:
        """Return seed and offset of the device's generator."""
        state: torch.Tensor = self.module.get_rng_state(self.torch_device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set seed and offset of the device's generator."""
        self.module.set_rng_state(state, self.torch_device)

    def driver(self) -> _core.Driver:
        """Return a driver that uses the library of this kind of device."""
        return _core.cuda_driver(self.torch_device.index or 0, LIBRARIES[self.torch_device.type])
