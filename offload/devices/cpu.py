"""The CPU as a device: the caller computes, in RAM.

Beside the data path; `device.py` says what each method is for.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload import _core
from offload.devices.control_group import control_groups

_KIB = 1024


class Cpu:
    """Its clock is the caller's; its memory is the process's."""

    torch_device = torch.device("cpu")
    is_accelerator = False
    in_flight_bytes_max = 64 << 20

    def current_stream(self) -> int:
        """None: 0."""
        return 0

    def record_use(self, tensor: torch.Tensor) -> None:
        """Nothing is queued."""

    def mark(self) -> float:
        """The time."""
        return time.perf_counter()

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float]:
        """Known at once."""
        return [mark - first for mark in marks]

    def synchronize(self) -> None:
        """Nothing is queued."""

    def total_bytes(self) -> int:
        """RAM that this process may use."""
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        limits += [limit for limit, _ in control_groups()]
        return min(limits)

    def allocated_bytes(self) -> int:
        """The resident set."""
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """The largest resident set of the process's life."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    def reset_peak(self) -> None:
        """The system keeps its own mark."""

    def name(self) -> str:
        """Its kind."""
        return "cpu"

    def uuid(self) -> str:
        """There is one."""
        return ""

    def random_state(self) -> torch.Tensor:
        """Torch's default generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Torch's default generator."""
        torch.set_rng_state(state)

    def driver(self) -> _core.Driver:
        """Worker threads."""
        return _core.HostDriver()
