"""What hooks count: tensors and bytes swapped and kept, steps, and what each measured step took.

Reports show it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from offload import _core  # in this form an extension that is not built is said in plain words

__all__ = ["Count", "Counts", "StepRecord"]

Count = _core.Count


@dataclass(frozen=True)
class StepRecord:
    """One step that was measured, from the beginning of forward to the end of backward."""

    profiled: bool  # a signature's first step, which moves everything and waits for it
    predicted_seconds: float | None
    seconds: float
    paused_seconds: float  # of it: within the engine, waiting included
    is_trial: bool = False  # proves how tensors can be recomputed, and computes more for it
    is_reference: bool = False  # waits while it copies, so that copies do not slow its computation

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return dict(vars(self))


STEP_RECORDS_MAX = 256


class Counts(defaultdict[str, Count]):
    """What a session's hooks met: by reason for what stayed, and what moved."""

    def __init__(self) -> None:
        super().__init__(Count)
        self.swapped = Count()
        self.duplicates = Count()
        self.dropped = Count()  # in forward, to be made again
        self.recomputed = Count()  # made again in backward, as often as that was
        self.recompute_seconds = 0.0
        self.prefetches = _core.Gauge()
        self.prefetches_left = _core.Gauge()  # to demand: there was no memory
        self.prefetched_late = 0
        self.unmeasured_steps = 0
        self.loaded_late = 0
        self._follows = False
        self._misses_before = 0
        self.begun = _core.Gauge()  # steps; what measures one of them looks whether another begins
        self.profiled_steps = 0
        self.trial_steps = 0
        self.reference_steps = 0
        self.borrowed_steps = 0
        self.bare_steps = 0
        self.steps_measured: deque[StepRecord] = deque(maxlen=STEP_RECORDS_MAX)

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self.begun.now

    @steps.setter
    def steps(self, count: int) -> None:
        self.begun.now = count

    @property
    def prefetched(self) -> int:
        """Copy-ins begun ahead of need."""
        return self.prefetches.now

    @property
    def prefetches_without_memory(self) -> int:
        """Prefetches that found no memory and were left to demand."""
        return self.prefetches_left.now

    def begin_step(self) -> None:
        """A forward pass begins: what follows is `in_step`."""
        _core.begin_step((self.swapped, self.dropped, *self.values()))

    def attribute_misses(self, misses: int, follows: bool | None = None) -> None:
        """Of all `misses` so far, those since the last call were late if the step follows a schedule.

        `follows` tells it of the step that now begins; None: the same step goes on.
        """
        if self._follows:
            self.loaded_late += misses - self._misses_before
        self._misses_before = misses
        self._follows = self._follows if follows is None else follows

    def dropped_in_step(self) -> Count:
        """What has been dropped since the last forward pass began."""
        return self.dropped.in_step()

    def in_step(self) -> tuple[Count, dict[str, Count]]:
        """What has moved since the last forward pass began, and by reason what has stayed."""
        return self.swapped.in_step(), {reason: count.in_step() for reason, count in self.items()}
