"""When, after a search, its plan is compared with reference steps, and a rejected plan is measured again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from offload.control.limits import Limits

__all__ = ["Watch"]


@dataclass
class Watch:
    """Compares the plan's steps with the computation without swapping, after the search.

    Attributes
    ----------
    limits
        `recheck_steps`, `recheck_steps_max`, `remeasure_steps`, `measurements_before_judging`, `aim_min`.
    looks
        The last comparisons. Each is the slowdown of the plan's latest measured steps relative to a new reference step
        (a step without slowed computation, `plan_search.py`). There is an exception on an accelerator: if the plan was
        judged by reference steps that kept every tensor, it is compared with those, and no new reference step runs.
    interval
        A comparison is due in each step whose number is a multiple of this.
    ended_at
        Number of the step at which the search ended, or a plan had been measured again.
    """

    limits: Limits
    looks: deque[float] = field(init=False)
    interval: int = field(init=False)
    ended_at: int = 0

    def __post_init__(self) -> None:
        self.looks = deque(maxlen=self.limits.measurements_before_judging)
        self.interval = self.limits.recheck_steps

    def is_due(self, step: int, max_slowdown: float) -> bool:
        """Return whether a comparison is due in the step with this number, which begins.

        Sets the interval back to `recheck_steps` if the last comparison was above `max_slowdown`.
        """
        if self.looks and self.looks[-1] > max_slowdown:
            self.interval = self.limits.recheck_steps
        return step % self.interval == 0

    def begin(self) -> None:
        """Note that a comparison begins.

        Doubles the interval, but not at the first comparison.
        """
        if self.looks:
            self.interval = min(2 * self.interval, self.limits.recheck_steps_max)

    def is_remeasuring_due(self, step: int) -> bool:
        """Return whether a rejected plan may be measured again in the step with this number.

        From `remeasure_steps`, 2 × `remeasure_steps`, 4 × … on, once for each of these numbers after `ended_at`. The
        numbers depend on no measurement, so all processes of a job measure at about the same steps.
        """
        first = self.limits.remeasure_steps
        while first <= self.ended_at:
            first *= 2
        return step >= first

    def is_broken(self, max_slowdown: float) -> bool:
        """Return whether the plan was too slow in each of the last comparisons.

        Too slow means above `max_slowdown` by more than (1 − `aim_min`) × `max_slowdown`. The search leaves at most as
        much below `max_slowdown`, for noise.
        """
        looks = self.looks
        allowed = (2 - self.limits.aim_min) * max_slowdown
        return len(looks) == looks.maxlen and all(slowdown > allowed for slowdown in looks)
