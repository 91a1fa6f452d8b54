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
        Number of signatures (the shapes and kinds of a step's inputs) whose plans are kept. If there are more, the one
        unused for longest is discarded.
    borrow_from
        Once this many signatures have a profile, steps of a new signature may follow the plan of one with
        larger inputs.
    pending_steps
        While a profiled step waits for its backward, this many further steps that need a profile may begin. If more
        begin, the profile of the step that waits is given up.
    deviations
        Number of steps of a signature that may differ from the recorded step in the tensors that they save, or in their
        order. After so many, the signature runs without a plan.
    region_trials
        Largest number of trial steps (see `noise`) that test whether compiled submodules can be recomputed. One that
        differs from the recorded step is repeated; repetitions count.
    incomplete_profiles
        Number of profiles in a row that may be incomplete: without the step's temporaries, because another profiler was
        running; or with time and memory of another session's work. The last of them is used.
    replans
        Number of new plans that measured steps may cause in one search.
    recheck_steps, recheck_steps_max
        If a plan neither swaps nor recomputes, one step in `recheck_steps` runs with hooks and is compared with the
        recorded step. With `max_slowdown`, a plan is compared with reference steps (steps without slowed computation,
        `plan_search.py`) again after the search, in each step whose number is a multiple of `recheck_steps`. While the
        plan keeps `max_slowdown`, this interval doubles at each comparison but the first, up to `recheck_steps_max`
        (`Watch`).
    remeasure_steps, remeasure_gain
        After the search, a rejected plan may be measured again (`most_promising`): from step `remeasure_steps` on, and
        again each time the number of steps has doubled; if the expected gain is at least `remeasure_gain` times the
        peak without swapping.
    measurements, measurements_before_judging
        Number of measured steps that are kept, and number that is needed before they are compared with the plan. One
        step would not be enough: other programs may have slowed it.
    measurements_before_keeping, margins_before_keeping
        The first plan of a search is kept after `measurements_before_keeping` of its steps, and as many reference
        steps, if its estimated slowdown is below `max_slowdown` by at least `margins_before_keeping` times its margin
        of error; after `judged_steps` of each kind, a difference of one margin is enough. The margin follows from the
        deviation of its own steps alone, which for few steps is often small by chance. For a later plan, at least half
        of the median deviation of all plans is assumed (`standard_error`). A plan that is wrongly rejected costs
        memory, but does not break the promise.
    judged_steps, judged_steps_max, standard_errors
        The slowdown of a plan has a margin of error: `standard_errors` times its standard error. With `max_slowdown`,
        the steps of a plan and its reference steps are measured until slowdown and `max_slowdown` differ by more than
        the margin, at most `judged_steps` of each. For the first plan of a search it is `judged_steps_max`: this plan
        is often near `max_slowdown`. (With more than `judged_steps` of each kind, it is kept only after
        `judged_steps_max`.) The first step of a plan does not count. The measured slowdown comes from the plan's own
        steps; the estimated one also uses those of other plans (`estimate.py`). A plan keeps `max_slowdown` if two
        bounds are at most `max_slowdown`: the estimated slowdown plus its margin, and the measured one minus its
        standard error (`TriedPlan.slowdown_max`).
    cost_spread, cost_spread_more, fixed_spread, plan_spread, predicted_spread
        Standard deviations that `estimate.py` assumes before plans are measured.

        * `cost_spread`: of the cost of a copied byte, relative to this cost.
        * `cost_spread_more`: of the cost of copying all tensors once, relative to the step's duration. Divided by the
          bytes of all tensors, it is added to the deviation that `cost_spread` gives for one byte. The cost of a
          recomputed byte has this part only.
        * `fixed_spread`: of a cost that is the same for every plan, relative to the step's duration.
        * `plan_spread`: of the part of a plan's slowdown that these costs do not explain.
        * `predicted_spread`: of the same part, relative to the slowdown that the plan predicts. The squares of both are
          added.
    earlier_gain, trainings_spread
        A search begins with a plan that an earlier one has rejected if the expected gain is at least `earlier_gain`
        times the peak without swapping (`EarlierSearches`). `trainings_spread`: standard deviation of a slowdown
        between trainings of the same step, besides its standard error.
    copies_slow
        On the CPU, reference steps with copies compute more slowly than steps that keep every tensor: by this share if
        they save all memory, and by less in proportion. It is subtracted.
    deviation_min
        Least standard error that is assumed for one pair of a step and a reference step (`Comparison.deviation`).
    search_steps
        The search for a plan ends once at least this many steps, reference steps included, have been measured to judge
        plans. A plan takes at least six, three of each kind; the first one 10 to 24 if it seems to keep
        `max_slowdown`. After 24 steps and one other plan, a third can be judged.
    steady_measured_every, device_measured_every
        Once the plan agrees with the measurements, one step in `steady_measured_every` is measured on the CPU, and one
        in `device_measured_every` on an accelerator: there, measuring a step records an event for each node and two for
        each hook that swaps.
    manual_measured_steps
        Number of steps that are measured in the manual mode (`n_tensors`); after them one in `recheck_steps` is
        measured.
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
        If the median of a plan's measured steps, or of its reference steps, is more than `uneven` times the shortest of
        them, other programs have slowed most of them, but not all. The plan is then measured again, at most `repeats`
        times.
    aim_min, aim_max
        Plans after the first aim at `max_slowdown` minus the last plan's margin of error, so that noise does not break
        the promise; but at least at `aim_min` and at most at `aim_max` times `max_slowdown`.
    peak_step
        The search ends if a plan that kept `max_slowdown` needs at most this much more memory (relative) than one that
        did not, or if a plan that uses most of `max_slowdown` would probably need at most this much less than the last
        one, or if a plan that is made because that one is predicted to be too slow does.
    noise
        Relative gain in time or memory that is not worth recomputation, nor a trial step unless the plan swaps and
        `max_slowdown` is given. (A trial step tests which tensors can be recomputed, and how long that takes.)
    search_share, device_search_share, search_seconds, search_effort_min
        With `max_slowdown`, the planner runs while training waits. `search_share`, on an accelerator
        `device_search_share`: how long it may take, relative to a step. `search_seconds`: how long it takes with the
        full effort, for up to 1,000 tensors; up to three times as long if tensors can be recomputed, which the shares
        do not include. `search_effort_min`: the least effort. Most plans are as good with it. The planner may run a
        second time for a plan, without recomputation; this run is shorter, and the shares do not include it. If a plan
        is predicted to exceed `max_slowdown`, another one may be made, with half of the effort (`halved`). On the CPU,
        free memory is returned to the system after a run, so the next step allocates its memory again; the shares do
        not include this time either.
    worth_hooks, worth_bytes, worth_tensors
        If the plan that the search ends with lowers the peak by less than `worth_hooks` (relative) or by less than
        `worth_bytes` (`worth_tensors` times `min_tensor_bytes` if that is less), nothing is swapped instead, if this
        stays within `memory_limit`: without hooks a step is as fast as plain torch's, and with them 1 to 3 % slower;
        and offload itself takes some MiB. Without `memory_limit`, there is no search if no plan can lower the peak by
        so much.
    hooks_share
        If a plan moves nothing, hooks stay only if copies of optimizer state that overlap with forward and backward
        make a cycle (an update with its passes) shorter by more than this share: about what hooks cost.
    min_tensor_bytes
        The caller's `min_tensor_bytes`.
    pinned_share, spare_pinned_bytes
        Once a plan agrees with the measurements, pinned host memory is returned if the store holds over
        `spare_pinned_bytes` more than `pinned_share` times the most that its steps have needed.
    growth_share, growth_bytes
        With `memory_limit`, steps are profiled again if the device's peak has grown within a planned step
        (`PeakWatch`). On the CPU: by more than `growth_share` of the limit, and by more than `growth_bytes`. On an
        accelerator: to more than the limit and `growth_share` of it. What counts as growth doubles each time. If a step
        needs more than the profiled one by over `growth_share` of the limit, it is planned again.
    kept_share, kept_room, device_kept_room
        Without `memory_limit`, reference steps keep every tensor if there is room. The *difference* is that of the peak
        without swapping and the plan's peak. On the CPU: if the difference is at most `kept_share` of the former, and
        `kept_room` times the difference is free for each process of the job on this machine. On an accelerator: if the
        free memory is at least the sum of what the step needs without swapping, `device_kept_room` − 1 times the
        difference, and `device_kept_room` times the difference for each further process that may use the device.
    """

    signatures: int = 64
    borrow_from: int = 4
    pending_steps: int = 2
    deviations: int = 4
    region_trials: int = 3
    incomplete_profiles: int = 3
    replans: int = 5
    recheck_steps: int = 64
    recheck_steps_max: int = 1024
    remeasure_steps: int = 128
    remeasure_gain: float = 0.01
    measurements: int = 5
    measurements_before_judging: int = 3
    measurements_before_keeping: int = 5
    margins_before_keeping: float = 6.0
    judged_steps: int = 8
    judged_steps_max: int = 12
    standard_errors: float = 1.0
    cost_spread: float = 1.0
    cost_spread_more: float = 0.1
    fixed_spread: float = 0.02
    plan_spread: float = 0.005
    predicted_spread: float = 0.5
    earlier_gain: float = 0.03
    trainings_spread: float = 0.01
    copies_slow: float = 0.025
    deviation_min: float = 0.003
    search_steps: int = 36
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
    aim_min: float = 0.8
    aim_max: float = 0.95
    peak_step: float = 0.05
    noise: float = 0.01
    search_share: float = 0.1
    device_search_share: float = 0.7
    search_seconds: float = 0.5
    search_effort_min: float = 0.05
    hooks_share: float = 0.03
    worth_hooks: float = 0.05
    worth_bytes: int = 16 << 20
    worth_tensors: int = 16
    min_tensor_bytes: int = 0
    pinned_share: float = 1.25
    spare_pinned_bytes: int = 1 << 30
    growth_share: float = 0.05
    growth_bytes: int = 16 << 20
    kept_share: float = 0.15
    kept_room: float = 8.0
    device_kept_room: float = 1.5

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

    def search_effort(self, step_seconds: float, tensors: int, *, on_cpu: bool) -> float:
        """Return the effort of a search inside a step: at most 1, which is the usual search."""
        share = self.search_share if on_cpu else self.device_search_share
        usual_seconds = self.search_seconds * max(1.0, tensors / 1000)
        return max(self.search_effort_min, min(1.0, share * step_seconds / usual_seconds))

    def halved(self, effort: float) -> float:
        """Return half of an effort, but at least the least effort."""
        return max(self.search_effort_min, effort / 2)


LIMITS = Limits()
