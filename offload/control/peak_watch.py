"""With `memory_limit`, notices that the device's peak has grown within a planned step."""

from __future__ import annotations

import torch

from offload.control.limits import Limits
from offload.devices.memory import peak_bytes

__all__ = ["PeakWatch"]


class PeakWatch:
    """Compares the device's peak of memory before and after steps that follow a plan.

    Hooks see what is saved for backward, but not what code outside of the model allocates, such as a loss that is added
    after some epochs. The device's peak includes it, but also other memory: so growth is only a reason to profile
    steps again. Nothing is noticed if the peak was as high before, for example while the model was loaded.

    Parameters
    ----------
    limit_bytes
        The memory limit. None: nothing is watched.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self._limit_bytes = limit_bytes
        self._growth_bytes = limits.growth_share * (limit_bytes or 0)
        if device.type == "cpu":  # the peak is that of the resident set, which malloc and other code change too
            self._growth_bytes = max(self._growth_bytes, limits.growth_bytes)
        self._before: int | None = None  # the peak when the step began; None if no step is watched
        self._has_grown = False

    def begin(self) -> None:
        """Note the peak: a step begins that is expected to need no more memory than the steps before it."""
        if self._limit_bytes is not None:
            self._before = peak_bytes(self._device)

    def cancel(self) -> None:
        """Stop watching the step: it differs from the profiled one in what it saves, so it may need more."""
        self._before = None

    def end(self) -> None:
        """Compare the peak with that before the watched step, if there is one: the step is over."""
        before, self._before = self._before, None
        if before is None or self._limit_bytes is None:
            return
        now = peak_bytes(self._device)
        # The resident set includes all tensors, so it is at least as large as what the limit counts.
        known = before if self._device.type == "cpu" else self._limit_bytes
        if now > max(before, self._limit_bytes) and now - known > self._growth_bytes:
            self._has_grown = True
            self._growth_bytes *= 2

    def has_grown(self) -> bool:
        """Return whether the peak has grown in a watched step since the last call."""
        has_grown, self._has_grown = self._has_grown, False
        return has_grown
