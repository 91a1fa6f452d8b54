"""Keeps `max_slowdown` by measurement: what steps take without copies under way, and which plans kept the promise.

A reference step swaps what its plan swaps, but waits for each copy at once, so that no copy slows its computation. Its
nodes are what the step takes without swapping, on this machine and at this time. What steps of the plan take more is
due to swapping; the next plan counts with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from offload.control.limits import Limits
from offload.plan import Link, Plan

__all__ = ["Frontier", "TriedPlan"]


@dataclass(frozen=True)
class TriedPlan:
    """A plan whose steps have been measured.

    Attributes
    ----------
    slowdown
        Relative to the computation of reference steps: 0.05 means that a step took 5 % longer.
    """

    plan: Plan
    slowdown: float


@dataclass
class Frontier:
    """Reference steps of a signature, and what its plans turned out to cost.

    Attributes
    ----------
    limits
        How many measurements are kept and needed.
    references
        Seconds of each node, of the last reference steps.
    begun
        Reference steps begun since the present plan.
    tried
        Plans that have been judged, in that order.
    is_settled
        Whether the search is over: the present plan stays.
    looks
        Once settled: the slowdown of the steps around each of the last reference steps.
    """

    limits: Limits
    references: deque[tuple[float, ...]] = field(init=False)
    begun: int = 0
    tried: list[TriedPlan] = field(default_factory=list)
    is_settled: bool = False
    looks: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.looks = deque(maxlen=self.limits.measurements_before_judging)
        self.references = deque(maxlen=self.limits.measurements)

    @property
    def compute_seconds(self) -> float | None:
        """What the step takes without swapping; None before there are enough reference steps."""
        if not self._are_enough([sum(row) for row in self.references]):
            return None
        return median(sum(row) for row in self.references)

    def node_seconds(self) -> list[float]:
        """Each node's median."""
        return [median(column) for column in zip(*self.references, strict=True)]

    def add_reference(self, node_seconds: Sequence[float], step_seconds: Sequence[float]) -> None:
        """Take in a reference step, and once settled compare the last steps of the plan with it."""
        self.references.append(tuple(node_seconds))
        if self.is_settled and step_seconds:
            self.looks.append(median(step_seconds) / sum(node_seconds) - 1)

    def is_broken(self, max_slowdown: float) -> bool:
        """Whether a settled plan does not keep the promise any more: not at any of the last looks."""
        looks = self.looks
        allowed = (2 - self.limits.aim) * max_slowdown
        return len(looks) == looks.maxlen and all(slowdown > allowed for slowdown in looks)

    def start_again(self) -> None:
        """Search anew: what was tried is no longer true."""
        self.is_settled = False
        self.tried.clear()
        self.looks.clear()
        self.references.clear()

    def is_due(self, plan_steps: int) -> bool:
        """Whether the step that begins is to be a reference step, after `plan_steps` steps of the present plan.

        They alternate with steps of the plan, so that what slows one of both slows the other too.
        """
        is_known = self.begun > 0 and self.compute_seconds is not None
        return not is_known and self.begun <= plan_steps

    def _are_enough(self, seconds: Sequence[float]) -> bool:
        """Whether so many measurements tell a duration: more are needed where they differ much."""
        if len(seconds) < self.limits.measurements_before_judging:
            return False
        is_noisy = max(seconds) - min(seconds) > self.limits.tolerance * median(seconds)
        return not is_noisy or len(seconds) >= self.limits.measurements

    def byte_seconds(self, plan: Plan, computed_seconds: Sequence[float], link: Link) -> float:
        """By how much each swapped byte slows the computation, in seconds.

        Parameters
        ----------
        plan
            The plan that the measured steps followed.
        computed_seconds
            What all nodes of a step took together, by step.
        link
            Has the figure so far. After the first plan the mean of both counts, since each is noisy.
        """
        size = {tensor.id: tensor.bytes for tensor in plan.trace.tensors}
        swapped = sum(size[swap.id] for swap in plan.swaps)
        if self.compute_seconds is None or not swapped or not computed_seconds:
            return link.byte_seconds
        found = max(0.0, median(computed_seconds) - self.compute_seconds) / swapped
        return found if len(self.tried) < 2 else (found + link.byte_seconds) / 2

    def judge(self, plan: Plan, step_seconds: Sequence[float]) -> float | None:
        """The slowdown of the plan's measured steps, which is kept; None where it is not known yet."""
        compute = self.compute_seconds
        if compute is None or not self._are_enough(step_seconds):
            return None
        slowdown = median(step_seconds) / compute - 1
        self.tried = [each for each in self.tried if each.plan is not plan]
        self.tried.append(TriedPlan(plan, slowdown))
        return slowdown

    def reason_to_move(self, max_slowdown: float, least_peak_bytes: int) -> str | None:
        """Why another plan may keep the promise better than the one judged last; None where it may stay.

        Parameters
        ----------
        max_slowdown
            The promise.
        least_peak_bytes
            The least peak that any plan has.
        """
        last = self.tried[-1]
        if last.slowdown > max_slowdown:
            return f"a step took {last.slowdown:.1%} more than without swapping"
        has_time = last.slowdown < self.limits.spare * max_slowdown
        noise = 1 + self.limits.noise
        is_least = last.plan.peak_bytes <= noise * least_peak_bytes
        broken = [each.plan.peak_bytes for each in self.tried if each.slowdown > max_slowdown]
        is_next_to_broken = broken and last.plan.peak_bytes <= (1 + self.limits.peak_step) * max(broken)
        if has_time and not is_least and not is_next_to_broken:
            return f"a step took only {last.slowdown:.1%} more than without swapping"
        return None

    def best(self, max_slowdown: float) -> Plan | None:
        """The plan of least memory among those that kept the promise; None where none did."""
        kept = [each for each in self.tried if each.slowdown <= max_slowdown]
        return min(kept, key=lambda each: each.plan.peak_bytes).plan if kept else None
