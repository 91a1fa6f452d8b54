"""The simulated accelerator's virtual clock: how long a step takes on a device of given figures.

`clock.h` says how it is told. While `on` holds, Python's own clock tells it too, so that whatever measures by it (the
library's calibration, for one) lives in that world; files and processors keep their own time.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from unittest import mock

from twin import sim

KERNELS, COPIES_OUT, COPIES_IN = range(3)
POLL_SECONDS = 5e-5  # what a sleep takes at least, so that polling does not take for ever

Span = tuple[float, float]


class _Figures(ctypes.Structure):
    pass


@dataclass(frozen=True)
class Figures:
    """What a device does in a second, and what everything takes besides.

    Attributes
    ----------
    flops_per_second, bytes_per_second
        Of kernels: the one that takes longer counts.
    kernel_seconds, copy_seconds
        What a kernel, and a copy over the link, takes on top.
    out_bytes_per_second, in_bytes_per_second
        Of the link, out of the device and into it, each a lane of its own.
    launch_seconds
        What the host takes to queue a kernel or a copy.
    host_factor
        How much of the host's own time counts: 0 for none, so that runs do not differ.
    """

    flops_per_second: float
    bytes_per_second: float
    out_bytes_per_second: float
    in_bytes_per_second: float
    kernel_seconds: float = 0.0
    copy_seconds: float = 0.0
    launch_seconds: float = 0.0
    host_factor: float = 0.0


_Figures._fields_ = [
    (name, ctypes.c_double)
    for name in (
        *("flops_per_second", "bytes_per_second", "kernel_seconds"),
        *("out_bytes_per_second", "in_bytes_per_second", "copy_seconds", "launch_seconds", "host_factor"),
    )
]
_machine = ctypes.CDLL(sim.LIBRARY)
_machine.sim_clock_start.argtypes = (ctypes.POINTER(_Figures),)
_machine.sim_clock_now.restype = ctypes.c_double
_machine.sim_clock_sleep.argtypes = (ctypes.c_double,)
_machine.sim_clock_work.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_machine.sim_clock_work.restype = ctypes.c_size_t


def now() -> float:
    """The host's time, in seconds."""
    return float(_machine.sim_clock_now())


def sleep(seconds: float) -> None:
    """The calling thread does nothing for so long."""
    _machine.sim_clock_sleep(max(seconds, POLL_SECONDS))


@contextlib.contextmanager
def on(figures: Figures) -> Iterator[None]:
    """Inside, the machine and Python's `time` tell virtual time."""
    sim.module.synchronize()
    _machine.sim_clock_start(_Figures(**{each.name: getattr(figures, each.name) for each in fields(figures)}))
    clocks = {"perf_counter": now, "monotonic": now, "sleep": sleep}
    try:
        with mock.patch.multiple(time, **clocks):
            yield
    finally:
        sim.module.synchronize()
        _machine.sim_clock_stop()


def take_work() -> tuple[list[Span], list[Span], list[Span]]:
    """When kernels ran, copies out and copies in, since this was asked last; the last may lie ahead."""
    count = _machine.sim_clock_work(None, None, None, 0)
    begins, ends, units = (ctypes.c_double * count)(), (ctypes.c_double * count)(), (ctypes.c_int * count)()
    _machine.sim_clock_work(begins, ends, units, count)
    found: tuple[list[Span], list[Span], list[Span]] = ([], [], [])
    for begin, end, unit in zip(begins, ends, units, strict=True):
        found[unit].append((begin, end))
    return found


def united(*lists: list[Span]) -> list[Span]:
    """The times at which any of them is under way, in order and apart from each other."""
    found: list[Span] = []
    for begin, end in sorted(span for spans in lists for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def seconds_of(spans: list[Span]) -> float:
    """How long they take, one by one."""
    return sum(end - begin for begin, end in spans)
