"""Measures how much of this process's processors other programs use, from the kernel's counts.

A link that is measured while other programs use the processors is not cached.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["used_by_others"]

log = logging.getLogger("offload")

PROCESSOR_TIMES = Path("/proc/stat")


@contextmanager
def used_by_others() -> Iterator[Callable[[], float]]:
    """Measure the share of this thread's processors that other programs use inside the block.

    Yields
    ------
    callable
        Call it after the block. It returns a fraction of the processors' time; NaN if the system does not report it.
        It includes user time and time that a hypervisor has stolen. It excludes kernel time, which may be spent for
        this process.
    """
    fraction = math.nan
    processors = os.sched_getaffinity(0)
    begun, used_begun = time.perf_counter(), _seconds_of_others(processors)
    try:
        yield lambda: fraction
    finally:
        seconds = (time.perf_counter() - begun) * len(processors)
        fraction = (_seconds_of_others(processors) - used_begun) / seconds


def _seconds_of_others(processors: set[int]) -> float:
    try:
        lines = [line.split() for line in PROCESSOR_TIMES.read_text(encoding="ascii").splitlines() if line]
    except OSError as error:
        log.info("this system does not report how much other programs use the processors: %s", error)
        return math.nan
    names = {f"cpu{each}" for each in processors}
    ticks = [sum(map(int, line[1:3] + line[8:9])) for line in lines if line[0] in names]  # user, nice; steal
    if len(ticks) != len(names) or not any(ticks):  # a processor is missing, or a sandbox reports only zeros
        return math.nan
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - os.times().user
