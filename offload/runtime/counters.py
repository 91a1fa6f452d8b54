"""The counts of hooks: tensors and bytes swapped and kept, steps, and the durations of measured steps.

Reports show them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from offload import _core  # in this form, a clear error is raised if the extension is not built

__all__ = ["Count", "Counts", "StepRecord"]

Count = _core.Count


@dataclass(frozen=True)
class StepRecord:
    """One step that was measured, from the beginning of forward to the end of backward."""

    profiled: bool  # a signature's first step, which swaps every tensor and waits for each copy
    predicted_seconds: float | None
    seconds: float
    paused_seconds: float  # the part of `seconds` that was spent in hooks, waits included
    is_trial: bool = False  # runs recipes to test how tensors can be recomputed
    is_reference: bool = False  # no copy slows its computation: it waits for copies, or keeps every tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return dict(vars(self))


STEP_RECORDS_MAX = 256


class Counts(defaultdict[str, Count]):
    """Counts of a session: kept tensors by reason (as a dictionary), and swapped and dropped ones as attributes."""

    def __init__(self) -> None:
        super().__init__(Count)
        self.swapped = Count()
        self.duplicates = Count()
        self.dropped = Count()  # in forward, to be recomputed
        self._of_step = _core.CountList()
        self._of_step.add(self.swapped)
        self._of_step.add(self.dropped)
        self.recomputed = Count()  # in backward; a tensor that is recomputed twice counts twice
        self.recompute_seconds = 0.0
        self.prefetches = _core.Gauge()
        self.prefetches_left = _core.Gauge()  # prefetches skipped for lack of memory; the tensor is loaded on demand
        self.prefetched_late = 0
        self.unmeasured_steps = 0
        self.loaded_late = 0
        self._follows = False
        self._misses_before = 0
        self.began = time.monotonic()
        self.begun = _core.Gauge()  # steps begun; the meter of a step reads it to see whether another one begins
        self.profiled_steps = 0
        self.trial_steps = 0
        self.reference_steps = 0
        self.borrowed_steps = 0
        self.bare_steps = 0
        self.settled_steps = 0
        self.steps_measured: deque[StepRecord] = deque(maxlen=STEP_RECORDS_MAX)

    def __missing__(self, reason: str) -> Count:
        self[reason] = count = Count()
        self._of_step.add(count)
        return count

    @property
    def lacks_step(self) -> bool:
        """Whether tensors have been saved although no step has begun."""
        return self.steps == 0 and any(count.tensors for count in (self.swapped, *self.values()))

    @property
    def steps(self) -> int:
        """Number of steps that have begun."""
        return self.begun.now

    @property
    def prefetched(self) -> int:
        """Number of copy-ins that were started before backward needed the tensor."""
        return self.prefetches.now

    @property
    def prefetches_without_memory(self) -> int:
        """Number of prefetches skipped for lack of memory; the tensors were loaded on demand."""
        return self.prefetches_left.now

    def begin_step(self) -> None:
        """Begin a forward pass: `in_step` counts from here."""
        self._of_step.begin_step()

    def attribute_misses(self, misses: int, follows: bool | None = None) -> None:
        """Count the misses since the last call as late loads if the last step followed a schedule.

        Parameters
        ----------
        misses
            All misses so far.
        follows
            Whether the step that now begins follows a schedule; None if no step begins.
        """
        if self._follows:
            self.loaded_late += misses - self._misses_before
        self._misses_before = misses
        self._follows = self._follows if follows is None else follows

    def dropped_in_step(self) -> Count:
        """Return the count of tensors dropped since the last forward pass began."""
        return self.dropped.in_step()

    def in_step(self) -> tuple[Count, dict[str, Count]]:
        """Return the counts since the last forward pass began: swapped tensors, and kept tensors by reason."""
        return self.swapped.in_step(), {reason: count.in_step() for reason, count in self.items()}
