"""Keeps `max_slowdown` (the *promise*) by measurement.

`Frontier` stores how long computation takes while no copy runs, and which plans kept the promise.

While a reference step copies, it waits, so that no copy slows its computation (`plan/serial.py`). The durations of its
nodes show how long the step takes without swapping, on this machine and at this time. The additional time of the plan's
steps is due to swapping, and the next plan includes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from offload.control.limits import Limits
from offload.plan import Link, Plan
from offload.runtime.executor import Measured

__all__ = ["Frontier", "StepCost", "TriedPlan"]


@dataclass(frozen=True)
class TriedPlan:
    """A plan whose steps have been measured.

    Attributes
    ----------
    slowdown
        Relative to the computation of reference steps: 0.05 means that a step took 5 % longer.
    unexplained_seconds
        Seconds of the step beyond the computation of reference steps and the recomputation, waits and hooks that the
        plan predicts: the time by which copies slowed the computation.
    """

    plan: Plan
    slowdown: float
    unexplained_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that the plan swaps or recomputes."""
        size = {tensor.id: tensor.bytes for tensor in self.plan.trace.tensors}
        moved = [swap.id for swap in self.plan.swaps] + [row.id for row in self.plan.recomputes]
        return sum(size[tensor] for tensor in moved)


@dataclass(frozen=True)
class StepCost:
    """The duration of a step in seconds, twice: as elapsed time, and without the time that other programs took.

    Attributes
    ----------
    step, computed
        Elapsed seconds of the whole step, and of all its nodes together.
    own_step
        CPU time of the thread plus a part of its waits: the share of the processor that the thread had while it
        computed. Equal to `step` if the CPU time is unknown.
    own_computed
        CPU time of the thread without that of hooks. Equal to `computed` if the CPU time is unknown.
    """

    step: float
    computed: float
    own_step: float
    own_computed: float

    @classmethod
    def of(cls, measured: Measured) -> StepCost:
        """Return the cost of a measured step."""
        computed, own = sum(measured.node_seconds), measured.thread_seconds
        if own is None:
            return cls(measured.step_seconds, computed, measured.step_seconds, computed)
        own_computed = own - measured.hook_seconds
        share = min(1.0, own_computed / computed) if computed > 0 else 1.0  # of the processor, left by other programs
        waited = max(0.0, measured.stall_seconds - measured.hook_seconds)
        return cls(measured.step_seconds, computed, own + share * waited, own_computed)


@dataclass
class Frontier:
    """Reference steps of a signature, and the measured slowdown of its plans.

    Attributes
    ----------
    limits
        How many measurements are kept and needed.
    references
        For each of the last reference steps: the seconds of its nodes, and its cost.
    begun
        Number of reference steps begun since the present plan was made.
    repeats
        How often the steps of the present plan have been measured again.
    tried
        Plans that have been judged, in the order of judging.
    recompute_byte_seconds
        Seconds by which each recomputed byte slows the computation: operators have to be recorded for it.
    fixed_seconds
        Seconds by which steps of every plan that swaps or recomputes are slower, however few bytes it moves.
    is_settled
        Whether the search is over: the present plan stays.
    looks
        After the search: for each of the last reference steps, the slowdown of the plan's latest measured steps,
        relative to this reference step.
    """

    limits: Limits
    references: deque[tuple[tuple[float, ...], StepCost]] = field(init=False)
    begun: int = 0
    repeats: int = 0
    tried: list[TriedPlan] = field(default_factory=list)
    recompute_byte_seconds: float = 0.0
    fixed_seconds: float = 0.0
    is_settled: bool = False
    looks: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.looks = deque(maxlen=self.limits.measurements_before_judging)
        self.references = deque(maxlen=self.limits.measurements)

    @property
    def compute_seconds(self) -> float | None:
        """Seconds of the step without swapping; None before there are enough reference steps."""
        computed = [self._computed(cost) for _, cost in self.references]
        return _lower_quartile(self._undisturbed(computed)) if self._are_enough(computed) else None

    @property
    def is_shared(self) -> bool:
        """Whether other programs used the processor in reference steps; CPU times are then compared, not elapsed times.

        The scheduler runs a thread that has just waited for a copy at once; a thread that only computes has to share
        the processor. So, beside other programs, elapsed times would make reference steps seem faster than steps
        without swapping.
        """
        shares = [cost.computed / cost.own_computed for _, cost in self.references if cost.own_computed > 0]
        return bool(shares) and median(shares) > 1 + self.limits.sharing

    def are_disturbed(self, steps: Sequence[StepCost]) -> bool:
        """Return whether other programs disturbed the measurement of the present plan.

        This is so if its reference steps took longer than earlier ones, or if its own steps differ from each other by
        more than copies can explain.
        """
        compute = self.compute_seconds
        if compute is None or not self.begun or not steps:
            return False
        recent = [self._computed(cost) for _, cost in list(self.references)[-self.begun :]]
        seconds = [self._step(cost) for cost in steps]
        limits = self.limits
        return median(recent) > (1 + limits.disturbed) * compute or median(seconds) > limits.uneven * min(seconds)

    def _computed(self, cost: StepCost) -> float:
        return cost.own_computed if self.is_shared else cost.computed

    def _step(self, cost: StepCost) -> float:
        return cost.own_step if self.is_shared else cost.step

    def node_seconds(self) -> list[float]:
        """Return the seconds of each node without swapping."""
        computed = [self._computed(cost) for _, cost in self.references]
        allowed = max(self._undisturbed(computed))
        rows = [nodes for (nodes, _), seconds in zip(self.references, computed, strict=True) if seconds <= allowed]
        return [_lower_quartile(column) for column in zip(*rows, strict=True)]

    def add_reference(self, measured: Measured, steps: Sequence[StepCost]) -> None:
        """Store a reference step; after the search, also compare the last `steps` of the plan with it."""
        cost = StepCost.of(measured)
        self.references.append((tuple(measured.node_seconds), cost))
        if self.is_settled and steps:
            self.looks.append(median(map(self._step, steps)) / self._computed(cost) - 1)

    def is_broken(self, max_slowdown: float) -> bool:
        """Return whether a settled plan was too slow in all of the last `looks`, by more than noise explains."""
        looks = self.looks
        allowed = (2 - self.limits.aim) * max_slowdown
        return len(looks) == looks.maxlen and all(slowdown > allowed for slowdown in looks)

    def start_again(self) -> None:
        """Search anew with new reference steps: the old measurements no longer hold."""
        self.search_again()
        self.references.clear()

    def search_again(self) -> None:
        """Forget the plans that were tried, because they no longer keep the memory limit."""
        self.is_settled = False
        self.tried.clear()
        self.looks.clear()

    def is_due(self, plan_steps: int) -> bool:
        """Return whether the step that begins is to be a reference step.

        Reference steps alternate with steps of the plan, so that other programs slow both kinds alike. A step of the
        plan comes first: the search for the plan has delayed it already, and a reference step takes longer still.

        Parameters
        ----------
        plan_steps
            Number of steps of the present plan so far.
        """
        is_known = self.begun > 0 and self.compute_seconds is not None
        return not is_known and self.begun < plan_steps

    def _undisturbed(self, seconds: Sequence[float]) -> list[float]:
        """Return the durations that are not much longer than the shortest: other programs disturbed the rest."""
        return [each for each in seconds if each <= self.limits.uneven * min(seconds)]

    def _are_enough(self, seconds: Sequence[float]) -> bool:
        """Return whether there are enough measurements to determine a duration: more if they differ much."""
        if len(seconds) < self.limits.measurements_before_judging:
            return False
        is_noisy = max(seconds) - min(seconds) > self.limits.tolerance * median(seconds)
        return not is_noisy or len(seconds) >= self.limits.measurements

    def learn(self, link: Link) -> Link:
        """Estimate from the tried plans by how much each moved byte slows the computation.

        Sets `fixed_seconds` and, if the last plan recomputes, `recompute_byte_seconds`.

        Parameters
        ----------
        link
            The link, with its present `byte_seconds`.

        Returns
        -------
        Link
            The link with the estimate as `byte_seconds`; unchanged while no plan has swapped.
        """
        points = [(each.moved_bytes, max(0.0, each.unexplained_seconds)) for each in self.tried]
        self.fixed_seconds, byte_seconds = _fitted([point for point in points if point[0]])
        if byte_seconds is None:
            return link
        if self.tried[-1].plan.recomputes:
            self.recompute_byte_seconds = byte_seconds
        return replace(link, byte_seconds=byte_seconds) if any(each.plan.swaps for each in self.tried) else link

    def wanted_slowdown(self, max_slowdown: float) -> float:
        """Return the predicted slowdown that the next plan may have.

        For the first plan this is `max_slowdown`, later less, so that noise does not break the promise. If several
        plans in a row were too slow, it is halved for each after the first; if several kept the promise, doubled.
        """
        if not self.tried or self.compute_seconds is None:
            return max_slowdown
        broken = [each.slowdown > max_slowdown for each in self.tried]
        alike = next((n for n, each in enumerate(reversed(broken)) if each != broken[-1]), len(broken)) - 1
        wanted = self.limits.aim * max_slowdown - self.fixed_seconds / self.compute_seconds
        return max(0.0, wanted) * (0.5 if broken[-1] else 2.0) ** alike

    def judge(self, plan: Plan, steps: Sequence[StepCost]) -> float | None:
        """Return the slowdown of the plan's measured steps and store it in `tried`; None if it is not known yet."""
        compute, seconds = self.compute_seconds, [self._step(cost) for cost in steps]
        if compute is None or not self._are_enough(seconds):
            return None
        taken = median(seconds)
        explained = plan.step_seconds - plan.compute_seconds + len(plan.swaps) * plan.link.swap_seconds
        self.tried = [each for each in self.tried if each.plan is not plan]
        self.tried.append(TriedPlan(plan, taken / compute - 1, taken - compute - explained))
        return self.tried[-1].slowdown

    def reason_to_move(self, max_slowdown: float, least_peak_bytes: int) -> str | None:
        """Return why to replace the plan that was judged last; None if it may stay.

        It is replaced if it was too slow, or so fast that another plan could save more memory.

        Parameters
        ----------
        max_slowdown
            The promise: the limit on the slowdown.
        least_peak_bytes
            The smallest peak that a plan can have.
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

    def slowdown_of(self, plan: Plan) -> float | None:
        """Return the slowdown of a plan; None if it has not been judged."""
        return next((each.slowdown for each in self.tried if each.plan is plan), None)

    def best(self, max_slowdown: float) -> Plan | None:
        """Return the plan of least memory among those that kept the promise; None if none did."""
        kept = [each for each in self.tried if each.slowdown <= max_slowdown]
        return min(kept, key=lambda each: each.plan.peak_bytes).plan if kept else None


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Estimate the duration of undisturbed steps: a low value, because other programs only make steps longer."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float | None]:
    """Fit a line a + b × bytes to points (bytes, seconds). Returns a and b, each at least 0; 0, None without points."""
    if not points:
        return 0.0, None
    middle = sum(size for size, _ in points) / len(points), sum(seconds for _, seconds in points) / len(points)
    spread = sum((size - middle[0]) ** 2 for size, _ in points)
    if spread == 0:
        return 0.0, middle[1] / middle[0]
    slope = sum((size - middle[0]) * (seconds - middle[1]) for size, seconds in points) / spread
    if slope <= 0:
        return middle[1], 0.0
    fixed = middle[1] - slope * middle[0]
    if fixed >= 0:
        return fixed, slope
    return 0.0, sum(size * seconds for size, seconds in points) / sum(size * size for size, _ in points)
