"""What tells one kind of device from another: streams, points in time, memory figures, the driver below.

Beside the data path: the engine and everything above it ask the `Device` of a model, and name no kind themselves.
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
    """One device: where models compute, and what is asked of it beside computing."""

    torch_device: torch.device
    is_accelerator: bool  # computes by itself, in memory of its own
    in_flight_bytes_max: int  # by default: sources held at a time for copies that have not ended

    def current_stream(self) -> int:
        """Driver's handle of the compute stream that the calling thread uses now; 0 on the CPU."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory for what the current stream has queued, whichever stream it was allocated on."""

    def mark(self) -> Any:
        """This point: of the current stream, or of the clock where the caller itself computes."""

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Seconds from one mark to others; None while the device has not come that far."""

    def synchronize(self) -> None:
        """Wait until everything queued has ended."""

    def total_bytes(self) -> int:
        """All of its memory."""

    def allocated_bytes(self) -> int:
        """In tensors now, as torch's allocator counts; on the CPU what is resident."""

    def peak_bytes(self) -> int:
        """Most of that so far, or since `reset_peak`."""

    def reset_peak(self) -> None:
        """Count `peak_bytes` from now on, where that can be."""

    def name(self) -> str:
        """What its maker calls it."""

    def uuid(self) -> str:
        """What tells it from others of its name; empty where nothing does."""

    def random_state(self) -> torch.Tensor:
        """State of its random number generator, in host memory."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Go on from a state that `random_state` told."""

    def driver(self) -> _core.Driver:
        """A driver of its own for it."""


def is_known(device: torch.device) -> bool:
    """Whether models on it can be enabled."""
    return device.type == "cpu" or device.type in accelerator.LIBRARIES


@cache
def device_of(device: torch.device) -> Device:
    """The device behind torch's name for it."""
    return Cpu() if device.type == "cpu" else Accelerator(device)


def accelerators(*, in_use: bool = False) -> list[Accelerator]:
    """Those of this machine that are known, and, if asked so, only where torch has begun to use them."""
    found = []
    for kind in accelerator.LIBRARIES:
        module = accelerator.module_of(kind)
        if module is not None and (module.is_initialized() if in_use else module.is_available()):
            found += [Accelerator(torch.device(kind, ordinal)) for ordinal in range(module.device_count())]
    return found


def default() -> torch.device:
    """Where a model goes when nobody says: the accelerator, else the CPU."""
    found = accelerators()
    return torch.device(found[0].torch_device.type) if found else torch.device("cpu")
