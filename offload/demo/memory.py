"""Samples memory over time in one training process of `offload demo`.

A thread takes the samples while the training runs. The peak also uses the high-water mark of the kernel or the
allocator, so that it does not depend on when samples are taken.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import torch

from offload.devices import allocator
from offload.devices.device import device_of

SAMPLE_SECONDS = 0.004

Sample = tuple[float, int]


class MemoryMeter:
    """Measures one process's memory between `start` and `stop`.

    On the CPU the bytes are the resident set (Linux: /proc/self; elsewhere: psutil), and besides
    the heap's bytes in use where the malloc counts them; on a GPU what torch's allocator has
    handed out. Used by one thread; the sampling thread is its own.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._known = device_of(torch.device(device))
        self.baseline_bytes = 0
        self.peak_bytes = 0
        self.started = 0.0
        self.samples: list[Sample] = []
        self.heap_samples: list[Sample] = []
        self._marked = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-meter", daemon=True)

    def start(self) -> None:
        """Take the present level as the baseline, forget earlier peaks and begin to sample."""
        if self._known.is_accelerator:
            self._known.synchronize()
            self._known.reset_peak()
        else:
            self._marked = _mark_resident_peak()
        self.baseline_bytes = self._now_bytes()
        self.started = time.perf_counter()
        self._thread.start()

    def stop(self) -> None:
        """End sampling and settle the peak: the larger of the samples' and the system's mark."""
        self._ended.set()
        self._thread.join()
        sampled = max((used for _, used in self.samples), default=self.baseline_bytes)
        if self._known.is_accelerator:
            self.peak_bytes = max(sampled, self._known.peak_bytes())
        else:
            self.peak_bytes = max(sampled, _resident_peak_bytes() if self._marked else 0)

    def seconds(self) -> float:
        """Seconds since `start`, the clock of the samples."""
        return time.perf_counter() - self.started

    def _now_bytes(self) -> int:
        if self._known.is_accelerator:
            return self._known.allocated_bytes()
        return resident_bytes()

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.samples.append((self.seconds(), self._now_bytes()))
            heap_bytes = allocator.bytes_in_use() if self.device == "cpu" else None
            if heap_bytes is not None:
                self.heap_samples.append((self.seconds(), heap_bytes))
            self._ended.wait(SAMPLE_SECONDS)


def resident_bytes() -> int:
    """Read the resident set of this process, in bytes.

    Raises
    ------
    RuntimeError
        Where there is no /proc and psutil is not installed.
    """
    try:
        with Path("/proc/self/statm").open(encoding="ascii") as fields:
            return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import psutil
    except ImportError:
        raise RuntimeError("no /proc to read the resident set from: pip install psutil") from None
    return int(psutil.Process().memory_info().rss)


def thin(samples: list[Sample], points_max: int) -> list[Sample]:
    """Keep the lowest and the highest sample of every stretch, in order, within `points_max`."""
    stretch = max(1, math.ceil(2 * len(samples) / points_max))
    if stretch <= 2:
        return samples[:]
    kept: list[Sample] = []
    for first in range(0, len(samples), stretch):
        part = samples[first : first + stretch]
        ends = {min(part, key=lambda sample: sample[1]), max(part, key=lambda sample: sample[1])}
        kept.extend(sorted(ends))
    return kept


def _mark_resident_peak() -> bool:
    """Make the kernel count the peak resident set from now on; False where it refuses."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident_peak_bytes() -> int:
    """Read the kernel's mark: VmHWM of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
