"""How much the controller may try, and what it takes for a deviation.

It is a plain table, so that a test can replace it.
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
        Signatures whose plans are kept; beyond it the one unused for longest goes.
    borrow_from
        Signatures with a plan before a new one may run on the plan of a larger one.
    pending_steps
        Steps that may begin before a profiled one has run its backward; after that nobody watches it any more.
    deviations
        Deviations of a signature from its recorded step before it runs without a plan.
    region_trials
        Trial steps of compiled submodules: one that deviates from the recorded step is repeated.
    incomplete_profiles
        Profiles of a signature that may miss its temporaries (another profiler was running) before one is planned with.
    replans
        New plans for a signature whose steps were measured.
    recheck_steps
        If a plan has no swaps, one step in this many is still checked.
    measurements, measurements_before_judging
        Number of measured steps that are kept, and the number that is needed before they are compared with the plan:
        other programs may have slowed a single step.
    device_measured_steps
        Number of steps that are measured on an accelerator, where each measurement records an event.
    steady_measured_every
        On the CPU, one step in this many is measured once the plan agrees with the measurements.
    manual_measured_steps
        Steps that are measured in the manual mode; after them one in `recheck_steps`.
    tolerance
        Relative error of a prediction that calls for a new plan.
    faster_link
        How much faster than planned the link has to be to call for a new plan.
    late_seconds
        A shorter wait for a tensor is not called late.
    swap_seconds_max
        What hooks of a swapped tensor take, at most, for the first plan: those of the profiled step take longer.
    exploring
        How many times `max_slowdown` a first plan may take where none within it moves anything: only steps tell.
    sharing
        Relative difference between the clock and the thread's CPU time that tells of other programs.
    disturbed, uneven, repeats
        Relative difference between reference steps, and ratio of the median of a plan's steps to the shortest, that
        tell of a neighbour; and how often a plan is measured again for one.
    aim, spare
        Of `max_slowdown`: the share that a plan after the first is made for, so that noise does not break the promise;
        and the share below which a step has time to swap more.
    peak_step
        Relative difference in memory between a plan that kept `max_slowdown` and one that did not, below which the
        search between both ends.
    noise
        Relative gain in time or memory that is not worth a trial step, or recomputation.
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
    device_measured_steps: int = 8
    steady_measured_every: int = 16
    manual_measured_steps: int = 5
    tolerance: float = 0.05
    faster_link: float = 0.25
    late_seconds: float = 0.5e-3
    swap_seconds_max: float = 1e-4
    exploring: float = 4.0
    sharing: float = 0.1
    disturbed: float = 0.15
    uneven: float = 1.4
    repeats: int = 3
    aim: float = 0.8
    spare: float = 0.6
    peak_step: float = 0.1
    noise: float = 0.01


LIMITS = Limits()
