"""Bounds and tolerances of the controllers: numbers of attempts, and differences that count as deviations.

They are a plain table, so that a test can replace it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds and tolerances of the controllers.

    Attributes
    ----------
    signatures
        Number of signatures whose plans are kept. If there are more, the one unused for longest is discarded.
    borrow_from
        Once this many signatures have a profile, steps of a new signature may follow the plan of a larger one.
    pending_steps
        Number of steps to be profiled that may begin after a profiled step and before its backward. If more begin, its
        profile is given up.
    deviations
        Number of deviations from the recorded step after which a signature runs without a plan.
    region_trials
        Number of trial steps of compiled submodules: a trial that deviates from the recorded step is repeated.
    incomplete_profiles
        Number of profiles in a row that may lack the step's temporaries, because another profiler was running. The last
        of them is used.
    replans
        Number of new plans that measured steps may cause for a signature.
    recheck_steps
        If a plan neither swaps nor recomputes, one step in this many runs with hooks and is compared with the recorded
        step.
    measurements, measurements_before_judging
        Number of measured steps that are kept, and number that is needed before they are compared with the plan. One
        step would not be enough: other programs may have slowed it.
    judged_steps, standard_errors
        The slowdown of a plan has a margin of error: `standard_errors` times its standard error. With `max_slowdown`,
        the steps of a plan and its reference steps are measured until slowdown and `max_slowdown` differ by more than
        the margin, at most `judged_steps` of each. A plan keeps `max_slowdown` if its slowdown plus the margin does,
        and if it was not clearly measured to be slower (`TriedPlan.slowdown_max`).
    cost_spread, cost_spread_more, fixed_spread, plan_spread, predicted_spread
        Standard deviations that are assumed before plans are measured (`estimate.py`): of the cost of a copied byte,
        relative to this cost; the same as a share of the step if all tensors are copied, added to the former, and also
        that of the cost of a recomputed byte; of the fixed cost; of a plan's own deviation; and of this, relative to
        the slowdown that the plan predicts.
    deviation_min
        Least standard deviation that is assumed of the ratio of two steps.
    searched
        The search for a plan ends once at least this many steps, reference steps included, have been measured to judge
        plans. Three of each kind are the least for a plan: then the first plan and `replans` others can be judged.
    steady_measured_every, device_measured_every
        One step in this many is measured once the plan agrees with the measurements: on the CPU; and on an accelerator,
        where a measured step records an event for each node and two for each hook that swaps.
    manual_measured_steps
        Number of steps that are measured in the manual mode; after them one in `recheck_steps` is measured.
    tolerance
        Relative error of a prediction above which a new plan is made.
    faster_link
        Relative difference above which a link that is faster than planned leads to a new plan.
    late_seconds
        A tensor is late if a step waits longer than this for it.
    swap_seconds_max
        Upper limit on the time in hooks per swapped tensor that the first plan assumes: hooks of the profiled step take
        longer than those of later steps.
    exploring
        If no plan within `max_slowdown` moves anything, a first plan may take this many times `max_slowdown`, because
        the cost of swapping is known only from measured steps.
    sharing
        Relative difference between elapsed time and the thread's CPU time above which other programs share the
        processor.
    uneven, repeats
        Other programs were busy during most of a plan's measured steps, but not all, if their median is more than
        `uneven` times the shortest. The plan is then measured again, at most `repeats` times.
    aim
        Fraction of `max_slowdown` at which plans after the first aim, so that noise does not break the promise.
    peak_step
        The search ends if a plan that kept `max_slowdown` needs at most this much more memory (relative) than one that
        did not, or if a plan with a slowdown of `aim` × `max_slowdown` would probably need at most this much less.
    noise
        Relative gain in time or memory that is not worth a trial step or recomputation.
    search_share, search_seconds, search_effort_min
        With `max_slowdown`, the share of a step that a search for a plan inside it may take; the seconds that a search
        takes with the full effort, for up to 1,000 tensors; and the least effort, with which plans are still good. A
        plan may need two searches, with and without recomputation; the second one is shorter.
    worth_hooks, worth_bytes, worth_tensors
        If the plan that the search ends with lowers the peak by less than `worth_hooks` (relative) or by less than
        `worth_bytes` (`worth_tensors` times `min_tensor_bytes` if that is less), nothing is swapped instead: without
        hooks a step is as fast as plain torch's, and with them 1 to 3 % slower; and offload itself takes some MiB. If
        no plan can lower it by so much, there is no search.
    min_tensor_bytes
        The caller's `min_tensor_bytes`.
    pinned_share, spare_pinned_bytes
        Once a plan agrees with the measurements, pinned host memory is returned if the store holds over
        `spare_pinned_bytes` more than `pinned_share` times the most that its steps have needed.
    kept_share, kept_room
        Reference steps keep every tensor if the plan lowers the peak by at most `kept_share` (relative), and if
        `kept_room` times the difference is free for each process of the job on this machine.
    """

    signatures: int = 64
    borrow_from: int = 4
    pending_steps: int = 2
    deviations: int = 4
    region_trials: int = 3
    incomplete_profiles: int = 3
    replans: int = 5
    recheck_steps: int = 64
    measurements: int = 5
    measurements_before_judging: int = 3
    judged_steps: int = 8
    standard_errors: float = 1.0
    cost_spread: float = 1.0
    cost_spread_more: float = 0.1
    fixed_spread: float = 0.02
    plan_spread: float = 0.005
    predicted_spread: float = 0.5
    deviation_min: float = 0.002
    searched: int = 32
    steady_measured_every: int = 16
    device_measured_every: int = 32
    manual_measured_steps: int = 5
    tolerance: float = 0.05
    faster_link: float = 0.25
    late_seconds: float = 0.5e-3
    swap_seconds_max: float = 1e-4
    exploring: float = 4.0
    sharing: float = 0.1
    uneven: float = 1.4
    repeats: int = 3
    aim: float = 0.8
    peak_step: float = 0.1
    noise: float = 0.01
    search_share: float = 0.3
    search_seconds: float = 1.0
    search_effort_min: float = 0.02
    worth_hooks: float = 0.05
    worth_bytes: int = 16 << 20
    worth_tensors: int = 16
    min_tensor_bytes: int = 0
    pinned_share: float = 1.25
    spare_pinned_bytes: int = 1 << 30
    kept_share: float = 0.15
    kept_room: float = 8.0

    def is_worth_hooks(self, peak_bytes: int, unswapped_peak_bytes: int) -> bool:
        """Return whether a plan with this peak saves enough memory."""
        return peak_bytes <= self.worthwhile_peak(unswapped_peak_bytes)

    @property
    def worth_bytes_min(self) -> int:
        """The least number of bytes by which a plan has to lower the peak."""
        return min(self.worth_bytes, self.worth_tensors * self.min_tensor_bytes)

    def worthwhile_peak(self, unswapped_peak_bytes: int) -> float:
        """Return the largest peak of a plan that saves enough memory."""
        least = max(self.worth_hooks * unswapped_peak_bytes, self.worth_bytes_min)
        return unswapped_peak_bytes - least

    def search_effort(self, step_seconds: float, tensors: int) -> float:
        """Return the effort of a search inside a step: at most 1, which is the usual search."""
        usual_seconds = self.search_seconds * max(1.0, tensors / 1000)
        return max(self.search_effort_min, min(1.0, self.search_share * step_seconds / usual_seconds))


LIMITS = Limits()
