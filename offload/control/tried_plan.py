"""A plan whose steps have been measured. `PlanSearch` judges it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import nan, sqrt
from statistics import NormalDist

from offload.control.limits import Limits
from offload.plan import Plan, recomputed, simulate

__all__ = ["TriedPlan", "assumed_seconds", "most_promising"]

_ERROR_MAX = 0.03  # of this more is never subtracted: a noisy machine would accept plans that measure far too slow


@dataclass(frozen=True)
class TriedPlan:
    """A plan whose steps have been measured.

    Attributes
    ----------
    measured
        Measured slowdown, relative to the computation of reference steps (after a wait, of the plan's own steps if that
        is shorter): 0.05 means that a step took 5 % longer.
    measured_error
        The standard error of `measured` (`standard_error`).
    deviation
        The standard error that one pair of a step and a reference step alone would give (`Comparison.deviation`).
    reference_steps
        Number of reference steps from which `measured` was computed.
    compute_seconds
        The computation time to which the latest steps were compared (`PlanSearch.judge`).
    unexplained_seconds
        Measured step time minus the computation time of reference steps, minus the recomputation, waits and hook time
        that the plan predicts. It is taken as the time by which copies and the recording of operators slowed the
        computation. The predicted recomputation includes an assumed time for the recording of operators
        (`recompute_byte_seconds` for each recomputed byte); it is subtracted without this assumed time.
    slowdown
        Estimated slowdown, from the measurements of all plans tried so far (`estimate.py`); at least 0.
    error
        Margin of error of `slowdown`: `Limits.standard_errors` times its standard error.
    keeps_all
        Whether the reference steps kept every tensor.
    is_earlier
        Whether it was measured in an earlier training only (`earlier_search.py`): no step of this one followed it.
    """

    plan: Plan
    measured: float
    measured_error: float
    deviation: float
    reference_steps: int
    compute_seconds: float
    unexplained_seconds: float
    slowdown: float = nan
    error: float = nan
    keeps_all: bool = False
    is_earlier: bool = False

    def pooled_with(self, earlier: TriedPlan) -> TriedPlan:
        """Return the mean of this measurement and an earlier one of the same plan, weighted by their reference steps.

        `measured_error`, `slowdown` and `error` do not change.
        """
        pairs = self.reference_steps + earlier.reference_steps
        share = self.reference_steps / pairs
        measured = share * self.measured + (1 - share) * earlier.measured
        deviation = sqrt(share * self.deviation**2 + (1 - share) * earlier.deviation**2)
        return replace(self._with_measured(measured), deviation=deviation, reference_steps=pairs)

    def combined_with(self, earlier: TriedPlan, error: float) -> TriedPlan:
        """Return the mean of this measurement and one of an earlier training, weighted by their inverse variances.

        `error`: the standard error of this measurement. `measured_error` becomes that of the mean.
        """
        own, other = error**-2, earlier.measured_error**-2
        measured = (own * self.measured + other * earlier.measured) / (own + other)
        return replace(self._with_measured(measured), measured_error=(own + other) ** -0.5)

    def _with_measured(self, measured: float) -> TriedPlan:
        explained_seconds = self.measured * self.compute_seconds - self.unexplained_seconds
        return replace(self, measured=measured, unexplained_seconds=measured * self.compute_seconds - explained_seconds)

    @property
    def slowdown_max(self) -> float:
        """The slowdown plus its margin of error. The plan keeps `max_slowdown` if this is at most `max_slowdown`.

        It is at least the measured slowdown minus its standard error, or minus `_ERROR_MAX` if the error is larger: a
        plan that was clearly measured to be too slow is too slow, whatever the estimate says.
        """
        return max(self.slowdown + self.error, self.measured - min(self.measured_error, _ERROR_MAX))

    @property
    def in_words(self) -> str:
        """The slowdown with its margin of error, and what was measured of this plan, in per cent."""
        measured = f"measured: {max(self.measured, 0.0):.1%} ± {self.measured_error:.1%}"
        return f"{self.slowdown:.1%} ± {self.error:.1%} ({measured})"

    @property
    def saved_bytes(self) -> int:
        """By how much the plan lowers the peak."""
        return self.plan.unswapped_peak_bytes - self.plan.peak_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that the plan copies out."""
        tensors = {tensor.id: tensor for tensor in self.plan.trace.tensors}
        return sum(tensors[swap.id].copied_bytes for swap in self.plan.swaps)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that the plan recomputes."""
        tensors = {tensor.id: tensor for tensor in self.plan.trace.tensors}
        return sum(tensors[row.id].bytes for row in self.plan.recomputes)


def assumed_seconds(plan: Plan, byte_seconds: float) -> float:
    """Return the part of the predicted step time that comes from an assumed `byte_seconds` for each recomputed byte.

    The result is less than `byte_seconds` × bytes if part of this time passes while the step would wait anyway.
    """
    dropped = {row.id for row in plan.recomputes}
    if not dropped or not byte_seconds:
        return 0.0
    tensors = []
    for tensor in plan.trace.tensors:
        recipe = tensor.recompute
        if tensor.id in dropped and recipe is not None:
            recipe = replace(recipe, seconds=max(0.0, recipe.seconds - byte_seconds * tensor.bytes))
        tensors.append(replace(tensor, recompute=recipe))
    lighter = replace(plan.trace, tensors=tuple(tensors))
    slow, fast = (simulate(recomputed(each, dropped), plan.swaps, plan.link) for each in (plan.trace, lighter))
    return slow.step_seconds - fast.step_seconds


def most_promising(
    tried: Iterable[TriedPlan], plan: Plan, max_slowdown: float, gain_min: float, limits: Limits
) -> TriedPlan | None:
    """Return the rejected plan that is most worth measuring again, in place of the present `plan`. None if none is.

    The *expected gain* is the memory that a rejected plan needs less than `plan`, multiplied by the probability that
    its slowdown is at most `max_slowdown`. (Its slowdown is assumed to be normally distributed, with the estimate as
    mean and its margin of error as standard deviation.) The plan with the largest expected gain is returned, if this is
    at least `gain_min` bytes.

    Plans that save too little are left out (`Limits.is_worth_hooks`); so are plans that were made for another amount of
    memory in use, or move other optimizer state, because their peaks cannot be compared.
    """
    best, gain_max = None, gain_min
    for each in tried:
        other = each.plan
        is_alike = (other.unswapped_peak_bytes, other.state) == (plan.unswapped_peak_bytes, plan.state)
        is_worth_it = limits.is_worth_hooks(other.peak_bytes, other.unswapped_peak_bytes)
        if each.slowdown_max > max_slowdown and each.error > 0 and is_alike and is_worth_it:
            probability = NormalDist(each.slowdown, each.error).cdf(max_slowdown)
            gain = probability * (plan.peak_bytes - other.peak_bytes)
            if gain >= gain_max:
                best, gain_max = each, gain
    return best
