"""Profiles a step again now and then if memory is limited: code outside of the model may need more than it did.

Hooks see what a step saves in the model's forward, and in `with handle.step():`. So a change there is noticed at once.
But a loss that is computed elsewhere may begin to need more memory, and neither torch nor malloc reports this on the
CPU.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

from offload.control.limits import Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import least_feasible_limit, make_plan
from offload.profiling.profiler import Profile, Profiler
from offload.units import format_bytes

__all__ = ["compare", "is_due", "take_over"]

log = logging.getLogger("offload")


def is_due(state: SignatureState, planned: PlannedStep, options: Options, limits: Limits) -> bool:
    """Return whether the step that begins is to be profiled again.

    With `memory_limit`, it is the first steady step after r, 3 × r, 7 × r, 15 × r, … steps of the profile, and later
    after each further `recheck_steps_max`; r is half of `recheck_steps`.
    """
    if options.memory_limit is None or state.phase is not Phase.STEADY:
        return False
    more = min(state.profiled_at + limits.recheck_steps // 2, limits.recheck_steps_max)
    return planned.steps >= state.profiled_at + more


def compare(
    state: SignatureState, planned: PlannedStep, profile: Profile, profiler: Profiler, options: Options, limits: Limits
) -> None:
    """Compare a step that was profiled again with its profile. Let it be planned again if it needs too much memory."""
    assert options.memory_limit is not None
    # A step that began before the backward of this one has used memory of its own.
    is_usable = not profiler.stopwatch.is_disturbed and not profiler.rounds_since
    if is_usable and take_over(planned, profile, options.memory_limit, limits):
        planned.restart_search()
        state.enter(Phase.PLANNING, "code outside of the model needs more memory")
    else:
        state.enter(Phase.STEADY)


def take_over(planned: PlannedStep, profile: Profile, limit_bytes: int, limits: Limits) -> bool:
    """Let the next plan assume the memory of a step that was profiled again. Return whether one is due.

    Only nodes that need more count, and only if some node needs over `noise` times the limit more. A new plan is due if
    the present one exceeds the limit with these bytes. If every plan does, this is a warning, and the present one
    stays. Nothing is taken over from an incomplete profile, or if backward ran in another order.
    """
    plan, known = planned.plan, planned.profile
    assert plan is not None
    if not profile.knows_temporaries or len(profile.trace.nodes) != len(known.trace.nodes):
        return False
    held = planned.held.raised_to(profile.held)
    before, now = (PlannedStep(limits, each, planned.link, held).trace().base_bytes for each in (known, profile))
    more = [max(0, b - a) for a, b in zip(before, now, strict=True)]
    if max(more, default=0) <= limits.noise * limit_bytes:
        return False
    base_bytes = tuple(map(sum, zip(known.trace.base_bytes, more, strict=True)))
    planned.profile = replace(known, trace=replace(known.trace, base_bytes=base_bytes))
    trace = planned.trace()
    recomputes = None if plan.swap_only else [row.id for row in plan.recomputes]
    peak_bytes, least_bytes = (
        make_plan(trace, planned.link, plan.swaps, recomputes=recomputes).peak_bytes,
        least_feasible_limit(trace),
    )
    if peak_bytes <= limit_bytes:
        return False
    if least_bytes > limit_bytes:
        planned.profile = known
        warnings.warn(
            f"steps need {format_bytes(peak_bytes)}, which exceeds memory_limit ({format_bytes(limit_bytes)}): code "
            f"outside of the model needs more memory than in the profiled step; the least limit that works now is "
            f"{format_bytes(least_bytes)}",
            stacklevel=2,
        )
        return False
    log.info("planning again: code outside of the model needs more memory than in the profiled step")
    return True
