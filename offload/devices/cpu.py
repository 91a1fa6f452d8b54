"""The CPU as a device: the calling thread computes, in RAM.

`device.py` has the contract of each method.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload import _core
from offload.devices.control_group import control_groups
from offload.devices.proc import resident_set


class Cpu:
    """The CPU: a mark is the time of the process's clock, and the memory is that of the process."""

    torch_device = torch.device("cpu")
    is_accelerator = False
    in_flight_bytes_max = 64 << 20

    def current_stream(self) -> int:
        """Return 0: there is no stream."""
        return 0

    def record_use(self, tensor: torch.Tensor) -> None:
        """Do nothing: no work is queued."""

    def mark(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float]:
        """Return the differences of the times."""
        return [mark - first for mark in marks]

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""

    def total_bytes(self) -> int:
        """Return the RAM that this process may use: the machine's RAM or, if less, the limit of a control group."""
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        limits += [limit for limit, _ in control_groups()]
        return min(limits)

    def allocated_bytes(self) -> int:
        """Return the resident set of the process."""
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """Return the largest resident set since the process started."""
        return resident_set()[1]

    def reset_peak(self) -> None:
        """Do nothing: the system's peak cannot be reset."""

    def name(self) -> str:
        """Return the kind of device."""
        return "cpu"

    def uuid(self) -> str:
        """Return an empty string: there is one CPU."""
        return ""

    def random_state(self) -> torch.Tensor:
        """Return the state of torch's default generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of torch's default generator."""
        torch.set_rng_state(state)

    def driver(self) -> _core.Driver:
        """Return a host driver, which copies on worker threads."""
        return _core.HostDriver()
