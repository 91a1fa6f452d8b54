"""Searches for a plan of little memory that keeps `max_slowdown` (the *promise*), by measuring each plan's steps.

In a *reference step*, computation stops while a copy runs, so that no copy slows it (`plan/serial.py`; on an
accelerator copy-outs, which hardly slow it, run meanwhile); or every tensor is kept
(`SlowdownPromise.reference_schedule` says when). The durations of its nodes (parts of the step, `runtime/schedule.py`)
show how long the step takes without swapping here and now (except after a wait: `computed_nodes`). `judge` subtracts
this duration, and the recomputation, waits and hooks that the plan predicts, from the measured duration of the plan's
steps. The remainder is taken as the time by which the computation was slowed: by copies and, if the plan recomputes, by
the recording of the operators that backward runs again. `estimate.py` fits costs per byte to the remainders of all
plans tried so far. The next plan uses these costs, and the slowdowns of the tried plans are estimated with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from statistics import median

from offload.control.estimate import estimated
from offload.control.limits import Limits
from offload.control.measured_slowdown import compared, computed_nodes, seconds_of_steps, standard_error
from offload.control.step_cost import StepCost
from offload.control.tried_plan import TriedPlan, assumed_seconds
from offload.control.watch import Watch
from offload.plan import Link, Plan
from offload.runtime.executor import Measured

__all__ = ["PlanSearch"]


@dataclass
class PlanSearch:
    """A search for the plan of least memory that keeps `max_slowdown`, for one signature.

    It stores the reference steps of the present plan, and the measured slowdowns of the plans tried so far.

    Attributes
    ----------
    limits
        Bounds and tolerances.
    references
        The last reference steps of the present plan. (Other programs were busier or less busy during earlier plans.)
    waits
        The nodes before which these reference steps wait for copies; empty if they keep every tensor, and on an
        accelerator.
    begun
        Number of reference steps started since the measurement of the present plan began.
    reference_node_seconds
        Elapsed seconds of each node without swapping (lower quartiles), by the reference steps of the plan that was
        judged last; None before the first judgement.
    repeats
        How often the steps of the present plan have been measured again.
    tried
        Plans that have been judged, in the order of judging.
    earlier
        Plans that an earlier training has judged (`earlier_search.py`). They are added to `tried` with the first
        judgement.
    is_anew
        Whether the search has begun again: then nothing of earlier trainings counts.
    expected_byte_seconds
        Seconds by which each copied byte slows the computation, as the first plan of this search assumes; None before
        that plan is judged.
    byte_seconds
        The same, as estimated from `tried`.
    recompute_byte_seconds
        Seconds by which each recomputed byte slows the computation, because operators have to be recorded: as estimated
        from `tried`. Plans with recomputation assume it.
    steps
        Number of steps that were measured to judge plans in this search, reference steps included.
    is_settled
        Whether the search has ended. It begins again if `watch.is_broken`, and goes on after `reopen`.
    plan_before
        While a plan is measured again after the search: the plan that was followed before. None otherwise.
    watch
        Comparisons with reference steps since the end of the search.
    """

    limits: Limits
    references: deque[StepCost] = field(init=False)
    waits: frozenset[int] = frozenset()
    begun: int = 0
    reference_node_seconds: list[float] | None = None
    repeats: int = 0
    tried: list[TriedPlan] = field(default_factory=list)
    earlier: list[TriedPlan] = field(default_factory=list)
    is_anew: bool = False
    expected_byte_seconds: float | None = None
    byte_seconds: float = 0.0
    recompute_byte_seconds: float = 0.0
    steps: int = 0
    is_settled: bool = False
    plan_before: Plan | None = None
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.limits)
        self.references = deque(maxlen=self.limits.judged_steps_max)

    @property
    def pairs_max(self) -> int:
        """How many steps of the present plan, and as many reference steps, are judged at most."""
        return self.limits.judged_steps if self.tried or self.earlier else self.limits.judged_steps_max

    @property
    def is_shared(self) -> bool:
        """Whether other programs used the processor in reference steps. CPU times are then compared, not elapsed times.

        On a busy machine the OS favours a thread that has just waited, as in reference steps, over one that computes
        all the time. By elapsed time, reference steps would therefore seem to compute faster than steps without
        swapping.
        """
        last = [*self.references][-self.limits.measurements :]
        shares = [cost.computed / cost.own_computed for cost in last if cost.own_computed > 0]
        return bool(shares) and median(shares) > 1 + self.limits.sharing

    def are_disturbed(self, steps: Sequence[StepCost]) -> bool:
        """Return whether other programs disturbed most of a plan's measured steps or reference steps, but not all.

        If they slowed all steps of one kind, they have slowed all of the other kind as well, because the two kinds
        alternate. Then the two can still be compared.
        """
        kinds = [self._step(cost) for cost in steps], [self._computed(cost) for cost in self.references]
        return any(seconds and median(seconds) > self.limits.uneven * min(seconds) for seconds in kinds)

    def _computed(self, cost: StepCost) -> float:
        return cost.own_computed if self.is_shared else cost.computed

    def _step(self, cost: StepCost) -> float:
        return cost.own_step if self.is_shared else cost.step

    def _nodes(self, cost: StepCost) -> list[float]:
        computed = cost.computed
        scale = cost.own_computed / computed if self.is_shared and computed > 0 else 1.0
        return [scale * seconds for seconds in cost.nodes]

    def _rest(self, steps: Sequence[StepCost]) -> list[float]:
        return [self._step(cost) - self._computed(cost) for cost in steps]

    def compare(self, steps: Sequence[StepCost]) -> tuple[float, float, float]:
        """Return what `compared` does, for these steps of the plan and the reference steps."""
        return compared([*map(self._nodes, steps)], [*map(self._nodes, self.references)], self._rest(steps), self.waits)

    def add_reference(self, measured: Measured, steps: Sequence[StepCost]) -> None:
        """Store a reference step. After the search, also compare the last `steps` of the plan with it."""
        cost = StepCost.of(measured)
        self.references.append(cost)
        if self.is_settled and steps:
            last = [self._step(each) for each in steps][-self.limits.measurements :]
            self.watch.looks.append(median(last) / self._computed(cost) - 1)

    def compare_with_search(self, plan: Plan | None, steps: Sequence[StepCost]) -> bool:
        """After the search, compare the last `steps` of the plan with the reference steps of the search.

        Called on an accelerator only. Does nothing and returns False, unless the plan was judged by reference steps
        that kept every tensor. After a search, new reference steps wait for copies, and a device that has paused
        computes faster for a while: they cannot be compared with those of the search.
        """
        judged = self.judged(plan)
        if judged is None or not judged.keeps_all:
            return False
        if steps:
            last = steps[-self.limits.measurements :]
            taken = seconds_of_steps([*map(self._nodes, last)], self._rest(last))
            self.watch.looks.append(taken / judged.compute_seconds - 1)
        return True

    def forget_steps(self) -> None:
        """Forget the reference steps, because a new plan will be measured, or the present one again."""
        self.begun = 0
        self.references.clear()

    def restart(self) -> None:
        """Forget the tried plans, so that the search begins again."""
        self.is_settled = False
        self.plan_before = None
        self.expected_byte_seconds = None
        self.tried.clear()
        self.earlier = []
        self.is_anew = True
        self.watch = Watch(self.limits)
        self.steps = 0

    def reopen(self, plan: Plan) -> None:
        """Let a tried plan be measured again, and `plan`, the present one, return if that one is rejected.

        The search ends again when the tried plan has been judged.
        """
        self.is_settled = False
        self.plan_before = plan
        self.watch.looks.clear()  # they are those of another plan
        self.watch.interval = self.limits.recheck_steps

    def is_due(self, plan_steps: int) -> bool:
        """Return whether the step that begins is to be a reference step.

        Reference steps alternate with steps of the plan, so that other programs slow both kinds alike. The first step
        of a new plan is not a reference step: planning already delays this step, and the waits of a reference step
        would delay it further. No more are due once `pairs_max` reference steps of the plan have been measured.

        Parameters
        ----------
        plan_steps
            Number of steps that have followed the present plan, without its reference steps.
        """
        return len(self.references) < self.pairs_max and self.begun < plan_steps

    def learn(self, link: Link) -> Link:
        """Return the link with the estimated cost of a copied byte; unchanged while no plan has swapped."""
        return replace(link, byte_seconds=self.byte_seconds) if any(each.plan.swaps for each in self.tried) else link

    def wanted_peak(self, max_slowdown: float) -> int:
        """Return the bytes that the next plan is to need at its peak. Must be called after the first plan was judged.

        If that plan is predicted to be too slow (`next_plan.goes_too_far`), another one is made.

        `_likely_saved` estimates the bytes saved by a plan that uses most of `max_slowdown`. A measurement may be far
        off, so the estimate is bounded. If one plan kept `max_slowdown` and another, which saves more bytes, did not,
        the next plan saves a number of bytes between the two, at least a quarter of the difference away from either.
        Without such a pair, it saves 0.15 to 0.75 times what the last plan saved if that was too slow, and 1.2 to 2
        times if not.
        """
        last = self.tried[-1]
        kept, broken = self._kept_beside_broken(max_slowdown)
        if kept is not None and broken is not None:
            more = broken.saved_bytes - kept.saved_bytes
            low, high = kept.saved_bytes + more / 4, broken.saved_bytes - more / 4
        else:
            low, high = (0.15, 0.75) if last.slowdown_max > max_slowdown else (1.2, 2.0)
            low, high = low * last.saved_bytes, high * last.saved_bytes
        saved = min(max(self._likely_saved(max_slowdown), low), high)
        return last.plan.unswapped_peak_bytes - int(saved)

    def _kept_beside_broken(self, max_slowdown: float) -> tuple[TriedPlan | None, TriedPlan | None]:
        """Return two plans that are next to one another in bytes saved; None in place of one that does not exist.

        The first is, of the plans that kept `max_slowdown`, the one that saves most. The second is, of the plans that
        exceeded it and save more than the first, the one that saves least.
        """
        kept = [each for each in self.tried if each.slowdown_max <= max_slowdown]
        most = max(kept, key=lambda each: each.saved_bytes, default=None)
        least = most.saved_bytes if most is not None else 0
        broken = [each for each in self.tried if each.slowdown_max > max_slowdown and each.saved_bytes > least]
        return most, min(broken, key=lambda each: each.saved_bytes, default=None)

    def aim(self, max_slowdown: float) -> float:
        """Return the slowdown at which the next plan aims: `max_slowdown` minus the last plan's margin of error.

        It is at least `aim_min` and at most `aim_max` times `max_slowdown`.
        """
        low, high = self.limits.aim_min * max_slowdown, self.limits.aim_max * max_slowdown
        return min(max(max_slowdown - self.tried[-1].error, low), high)

    def _likely_saved(self, max_slowdown: float) -> float:
        """Estimate the bytes saved by a plan with the slowdown `aim`.

        If there are two plans as `_kept_beside_broken` describes, the slowdown between them is assumed to be linear in
        the bytes saved. Otherwise it is assumed to be proportional to the bytes saved, as in the last plan. If the last
        plan was not slower at all, the estimate is the whole unswapped peak.
        """
        aim = self.aim(max_slowdown)
        kept, broken = self._kept_beside_broken(max_slowdown)
        if kept is not None and broken is not None:
            share = (aim - kept.slowdown_max) / (broken.slowdown_max - kept.slowdown_max)
            return kept.saved_bytes + max(0.0, share) * (broken.saved_bytes - kept.saved_bytes)
        last = self.tried[-1]
        return last.saved_bytes * aim / last.slowdown_max if last.slowdown_max > 0 else last.plan.unswapped_peak_bytes

    def judge(
        self, plan: Plan, steps: Sequence[StepCost], max_slowdown: float, *, keeps_all: bool = False
    ) -> float | None:
        """Estimate the slowdown of a plan, store it in `tried`, and return it. None if more measured steps are needed.

        Also sets `reference_node_seconds`, and estimates costs and slowdowns of all plans in `tried` again.

        Parameters
        ----------
        plan
            The present plan.
        steps
            Its last measured steps, without its first one and without reference steps.
        max_slowdown
            The limit on the slowdown. Returns None before `measurements_before_judging` steps of each kind, and then
            until all of these hold: (1) the estimated slowdown differs from the limit by at least its margin of error;
            (2) the estimated and the measured slowdown are on the same side of the limit; (3) the measured slowdown is
            not below zero by more than its standard error; (4) another plan of this search has been judged, or the
            estimated slowdown exceeds the limit, or is far below it (`Limits.margins_before_keeping`), or there are
            exactly `judged_steps` of each kind; (5) this plan has not been judged before. After `pairs_max` steps of
            each kind, the plan is judged in any case. If it has been judged before, by reference steps of the same
            kind, both measurements count; if that was in an earlier training, only if the plan is not clearly slower
            than the limit in this one.
        keeps_all
            Whether the reference steps keep every tensor.
        """
        count = min(len(steps), len(self.references))
        if count < self.limits.measurements_before_judging:
            return None
        compute, taken, deviation = self.compare(steps)
        if self.waits:
            compute *= 1 - self.limits.copies_slow * (1 - plan.peak_bytes / max(1, plan.unswapped_peak_bytes))
        explained = plan.step_seconds - plan.compute_seconds + len(plan.swaps) * plan.link.swap_seconds
        explained -= assumed_seconds(plan, self.recompute_byte_seconds)
        rest = taken - compute - explained
        own = TriedPlan(plan, taken / compute - 1, nan, deviation, count, compute, rest, keeps_all=keeps_all)
        known = self.tried or self.earlier
        earlier = _same(plan, known)
        others = [each for each in known if each is not earlier]
        deviations = [each.deviation for each in others]
        error = standard_error(own.deviation, count, deviations, self.limits)
        if earlier is not None and earlier.keeps_all == keeps_all:
            if not earlier.is_earlier:
                own = own.pooled_with(earlier)
                error = standard_error(own.deviation, own.reference_steps, deviations, self.limits)
            elif own.measured - error <= max_slowdown:  # else it is clearly too slow, whatever was measured before
                own = own.combined_with(earlier, error)
                error = own.measured_error
        own = replace(own, measured_error=error)
        expected = self.expected_byte_seconds
        expected = plan.link.byte_seconds if expected is None else expected
        found = estimated([*others, own], expected, self.limits)
        own = found.tried[-1]
        is_clear = abs(own.slowdown - max_slowdown) >= own.error and own.measured >= -own.measured_error
        is_clear = is_clear and (own.slowdown > max_slowdown) == (own.measured > max_slowdown)
        is_far = own.slowdown + self.limits.margins_before_keeping * own.error <= max_slowdown
        is_far = is_far and count >= self.limits.measurements_before_keeping
        has_judged = any(not each.is_earlier for each in others)
        may_keep = has_judged or is_far or count in (self.limits.judged_steps, self.limits.judged_steps_max)
        is_clear = is_clear and earlier is None and (may_keep or own.slowdown > max_slowdown)
        if not is_clear and count < self.pairs_max:
            return None
        self.expected_byte_seconds = expected
        self.tried, self.byte_seconds = found.tried, found.byte_seconds
        if any(each.recomputed_bytes for each in self.tried):
            self.recompute_byte_seconds = found.recompute_byte_seconds
        self.steps += 2 * count
        planned, references = ([cost.nodes for cost in costs] for costs in (steps, self.references))
        self.reference_node_seconds = computed_nodes(planned, references, self.waits).tolist()
        return own.slowdown

    def reason_to_move(self, max_slowdown: float, least_peak_bytes: int) -> str | None:
        """Return why to try another plan; None if the search may end.

        If the last plan was too slow, another one is tried, unless a plan that kept `max_slowdown` needs at most
        `peak_step` more memory than the last one.

        If the last plan kept `max_slowdown`, `_likely_saved` estimates the bytes saved by a plan that uses most of it.
        Such a plan is tried if it needs over `peak_step` less memory than the last plan, or if it saves enough to be
        worth the time of its hooks and the last plan does not. It is not tried if some plan was too slow although it
        saved hardly more than the last plan (its peak is at most `peak_step` lower).

        Parameters
        ----------
        max_slowdown
            The promise: the limit on the slowdown.
        least_peak_bytes
            The smallest peak that a plan can have.
        """
        last = self.tried[-1]
        if last.slowdown_max > max_slowdown:
            best = self.best(max_slowdown)
            if best is not None and best.peak_bytes <= (1 + self.limits.peak_step) * last.plan.peak_bytes:
                return None
            return f"steps were {last.in_words} slower than without swapping"
        unswapped_bytes = last.plan.unswapped_peak_bytes
        likely_bytes = max(int(unswapped_bytes - self._likely_saved(max_slowdown)), least_peak_bytes)
        gains = likely_bytes < (1 - self.limits.peak_step) * last.plan.peak_bytes
        if not self.limits.is_worth_hooks(last.plan.peak_bytes, unswapped_bytes):
            gains = gains or self.limits.is_worth_hooks(likely_bytes, unswapped_bytes)
        broken = [each.plan.peak_bytes for each in self.tried if each.slowdown_max > max_slowdown]
        nearest = max((peak for peak in broken if peak < last.plan.peak_bytes), default=0)
        is_next_to_broken = last.plan.peak_bytes <= (1 + self.limits.peak_step) * nearest
        if gains and not is_next_to_broken:
            return f"steps were only {last.in_words} slower than without swapping"
        return None

    def judged(self, plan: Plan | None) -> TriedPlan | None:
        """Return what is known of a plan that moves the same tensors at the same nodes; None if it was not judged."""
        return None if plan is None else _same(plan, self.tried)

    def best(self, max_slowdown: float) -> Plan | None:
        """Return the plan of least memory among those that kept the promise in this training; None if none did."""
        kept = [each for each in self.tried if each.slowdown_max <= max_slowdown and not each.is_earlier]
        return min(kept, key=lambda each: each.plan.peak_bytes).plan if kept else None

    def unmeasured_best(self, max_slowdown: float) -> Plan | None:
        """Return a plan that kept the promise in an earlier training only, if it needs less memory than `best`."""
        best = self.best(max_slowdown)
        kept = [each.plan for each in self.tried if each.slowdown_max <= max_slowdown and each.is_earlier]
        found = min(kept, key=lambda each: each.peak_bytes, default=None)
        if found is None or not self.limits.is_worth_hooks(found.peak_bytes, found.unswapped_peak_bytes):
            return None
        return found if best is None or found.peak_bytes < best.peak_bytes else None


def _same(plan: Plan, tried: Sequence[TriedPlan]) -> TriedPlan | None:
    """Return what was measured of a plan that moves the same tensors at the same nodes."""
    moves = plan.swaps, plan.recomputes
    return next((each for each in tried if moves == (each.plan.swaps, each.plan.recomputes)), None)
