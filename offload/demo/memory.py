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

    On the CPU it measures the resident set (Linux: /proc/self; elsewhere: psutil) and, if the malloc counts them, the
    heap's bytes in use; on a GPU, the bytes that torch's allocator has allocated. One thread uses this object, and
    another thread, which it starts, takes the samples.

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
        self._lap = 0  # number of samples before the present lap
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-meter", daemon=True)

    def start(self) -> None:
        """Use the present memory as the baseline, discard earlier peaks and begin to sample."""
        if self._known.is_accelerator:
            self._known.synchronize()
            self._known.reset_peak()
        else:
            self._marked = _mark_resident_peak()
        self.baseline_bytes = self._now_bytes()
        self.started = time.perf_counter()
        self._thread.start()

    def stop(self) -> None:
        """End sampling and set the peak: the larger one of the samples and of the system's high-water mark."""
        self._ended.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, *self._peaks())

    def lap(self) -> int:
        """Return the peak since the last call, or since `start`."""
        peak = max(self._peaks())
        self.peak_bytes = max(self.peak_bytes, peak)
        self._lap = len(self.samples)
        if self._known.is_accelerator:
            self._known.reset_peak()
        else:
            self._marked = _mark_resident_peak()
        return peak

    def _peaks(self) -> tuple[int, int]:
        """Return the peaks of the samples and of the high-water mark since the last lap."""
        sampled = max((used for _, used in self.samples[self._lap :]), default=self._now_bytes())
        if self._known.is_accelerator:
            return sampled, self._known.peak_bytes()
        return sampled, _resident_peak_bytes() if self._marked else 0

    def seconds(self) -> float:
        """Return the seconds since `start`; samples use the same clock."""
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
        There is no /proc, and psutil is not installed.
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
    """Return at most about `points_max` samples in order: the lowest and the highest of every interval."""
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
    """Make the kernel measure the peak resident set from now on. Return False if it refuses."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident_peak_bytes() -> int:
    """Return the kernel's high-water mark, VmHWM of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
