"""With `memory_limit`, notices that a planned step has needed much more memory than the steps before it."""

from __future__ import annotations

import logging

import torch

from offload.control.limits import Limits
from offload.devices.memory import peak_bytes
from offload.units import format_bytes

__all__ = ["PeakWatch"]

log = logging.getLogger("offload")


class PeakWatch:
    """Compares the peak of the device's memory before and after steps that follow a plan.

    Hooks see what is saved for backward, but not what code outside of the model allocates, such as a loss that is added
    after some epochs. The device's peak includes it. Nothing is noticed if the peak was as high before, for example
    while the model was loaded. On the CPU the peak is that of the resident set, which also grows for other reasons: so
    only a large growth within one step counts.

    Parameters
    ----------
    limit_bytes
        The memory limit. None: nothing is watched.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self._limit_bytes = limit_bytes
        self._known_bytes = limit_bytes or 0  # the limit, or a peak above it that has been noticed
        self._before: int | None = None  # the peak when the step began; None if the step is not watched
        self._latest: int | None = None  # the peak at the end of the step before, if that step was watched
        self._left = limits.growths if limit_bytes is not None else 0

    def begin(self) -> None:
        """Note the peak: a step begins that is expected to need no more memory than the steps before it."""
        if self._left:
            self._before = peak_bytes(self._device) if self._latest is None else self._latest

    def has_grown(self) -> bool:
        """Return whether the watched step, which ends now, needed much more memory. Logs it; at most `growths` times.

        On the CPU: whether the peak has grown by more than `growth_share` of the limit, and by more than
        `growth_bytes`. On an accelerator: whether it has grown, and exceeds the limit by more than `growth_share`.
        """
        before, self._before, self._latest = self._before, None, None
        if before is None:
            return False
        self._latest = now = peak_bytes(self._device)
        assert self._limit_bytes is not None
        allowed_bytes = self._limits.growth_share * self._limit_bytes
        if self._device.type == "cpu":
            has_grown = now - before > max(allowed_bytes, self._limits.growth_bytes)
        else:
            has_grown = now > before and now > self._known_bytes + allowed_bytes
        if has_grown:
            self._known_bytes = now
            self._left -= 1
            log.info(
                "a step needed more memory than the steps before it (%s more at its peak): each step is profiled again",
                format_bytes(now - before),
            )
        return has_grown
