"""A GPU that is not there: its memory, its link and its speed, as they are written for `offload fit --device`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from offload.devices.device import device_of
from offload.plan import Link
from offload.units import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes, parse_flops

__all__ = ["AbsentDevice", "matmul_flops", "parse_device"]

_LATENCY_SECONDS = 10e-6  # of a copy to or from pinned memory
_MATMUL_SECONDS = 0.1
_ROWS = {False: 1024, True: 4096}  # of the square matrices, on a CPU and on an accelerator


@dataclass(frozen=True)
class AbsentDevice:
    """A device to estimate for.

    Attributes
    ----------
    memory_bytes
        Size of its memory.
    bandwidth
        Of its link to pinned host memory in each direction, in bytes per second.
    flops
        Floating-point operations per second that it reaches in matrix products in float32.
    """

    memory_bytes: int
    bandwidth: float
    flops: float

    @property
    def link(self) -> Link:
        """Its link. Copies do not slow the computation: on a GPU its copy engines make them."""
        return Link(self.bandwidth, self.bandwidth, _LATENCY_SECONDS)

    def __str__(self) -> str:
        speed = f"{self.flops / 1e12:.3g} TFLOP/s"
        return f"{format_bytes(self.memory_bytes)}, {format_bandwidth(self.bandwidth)} each way, {speed}"


def parse_device(text: str, name: str = "device") -> AbsentDevice:
    """Return the device that is described by its memory, its link and its speed.

    Raises
    ------
    ValueError
        It is not described so.

    Examples
    --------
    >>> print(parse_device("12GiB,12GB/s,40TFLOP/s"))
    12.00 GiB, 12.00 GB/s each way, 40 TFLOP/s
    """
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(
            f'{name}: {text!r} is not understood; write memory, link and speed, such as "12GiB,12GB/s,40TFLOP/s"'
        )
    return AbsentDevice(parse_bytes(parts[0], name), parse_bandwidth(parts[1], name), parse_flops(parts[2], name))


def matmul_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the speed of matrix products on a device of this machine, in floating-point operations per second."""
    here = device_of(device)
    rows = _ROWS[here.is_accelerator]
    own = torch.Generator(device).manual_seed(0)  # the program's generator stays as it is
    a = torch.rand(rows, rows, device=device, dtype=dtype, generator=own)
    fastest, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < _MATMUL_SECONDS or fastest == float("inf"):
        here.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        here.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * rows**3 / fastest
