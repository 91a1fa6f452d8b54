"""The interface of a device: its streams, time marks, memory figures and driver.

The engine and all code above it use the `Device` of a model and do not distinguish kinds of devices themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from offload import _core
from offload.devices import accelerator
from offload.devices.accelerator import Accelerator
from offload.devices.cpu import Cpu

__all__ = ["Device", "accelerators", "default", "device_of", "is_known"]


class Device(Protocol):
    """A device on which models compute."""

    torch_device: torch.device
    is_accelerator: bool  # computes asynchronously, in its own memory
    in_flight_bytes_max: int  # default limit on the bytes of sources whose copy-out has not ended

    def current_stream(self) -> int:
        """Return the driver's handle of the calling thread's current stream; 0 on the CPU."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from reuse until the work now queued on the current stream has ended."""

    def mark(self) -> Any:
        """Return a time mark: an event recorded on the current stream; on the CPU, the time."""

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Return the seconds from `first` to each of `marks`; None if the device has not reached all of them yet."""

    def synchronize(self) -> None:
        """Wait until all queued work has ended."""

    def total_bytes(self) -> int:
        """Return the size of the device's memory; on the CPU, of the RAM that this process may use."""

    def allocated_bytes(self) -> int:
        """Return the bytes that torch's allocator has allocated to tensors; on the CPU, the resident set."""

    def peak_bytes(self) -> int:
        """Return the maximum of `allocated_bytes` so far, or since `reset_peak`."""

    def reset_peak(self) -> None:
        """Restart `peak_bytes` at the present use; without effect on the CPU."""

    def name(self) -> str:
        """Return the manufacturer's name of the device; "cpu" for the CPU."""

    def uuid(self) -> str:
        """Return an identifier that is unique among devices of the same name; empty if there is none."""

    def random_state(self) -> torch.Tensor:
        """Return the state of the device's random number generator, in host memory."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the generator to a state that `random_state` returned."""

    def driver(self) -> _core.Driver:
        """Return a new driver for the device."""


def is_known(device: torch.device) -> bool:
    """Return whether models on this device can be enabled."""
    return device.type == "cpu" or device.type in accelerator.LIBRARIES


@cache
def device_of(device: torch.device) -> Device:
    """Return the `Device` of a torch device."""
    return Cpu() if device.type == "cpu" else Accelerator(device)


def accelerators(*, in_use: bool = False) -> list[Accelerator]:
    """Return the supported accelerators of this machine; with `in_use`, only those whose kind torch has initialized."""
    found = []
    for kind in accelerator.LIBRARIES:
        module = accelerator.module_of(kind)
        if module is not None and (module.is_initialized() if in_use else module.is_available()):
            found += [Accelerator(torch.device(kind, ordinal)) for ordinal in range(module.device_count())]
    return found


def default() -> torch.device:
    """Return the device that is used if none is given: an accelerator if there is one, otherwise the CPU."""
    found = accelerators()
    return torch.device(found[0].torch_device.type) if found else torch.device("cpu")
