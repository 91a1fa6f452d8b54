"""What a step that was profiled again needs more than the profiled one: the next plan takes it into account."""

from __future__ import annotations

import logging
from dataclasses import replace

from offload.control.limits import Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import least_feasible_limit
from offload.profiling.profiler import Profile, Profiler
from offload.units import format_bytes

__all__ = ["keeps_profile", "take_over"]

log = logging.getLogger("offload")


def keeps_profile(
    state: SignatureState, profile: Profile, profiler: Profiler, options: Options, limits: Limits
) -> bool:
    """Compare the new profile of a step with its doubted one. Return False if the new one is to be used alone.

    Otherwise the doubted one is used again, with the memory that the new one needs more.
    """
    planned, limit_bytes = state.doubted, options.memory_limit
    if planned is None or limit_bytes is None:
        return False
    state.doubted = None
    if len(profile.trace.nodes) != len(planned.profile.trace.nodes):
        return False
    state.planned = planned
    # A step that began before the backward of this one has used memory of its own.
    is_usable = profile.knows_temporaries and not profiler.stopwatch.is_disturbed and not profiler.rounds_since
    if is_usable and take_over(planned, profile, limit_bytes, limits):
        planned.restart_search()
        state.enter(Phase.PLANNING, "the step needs more memory than the profiled one")
    else:
        state.enter(Phase.MEASURING, "the step needs no more memory than the profiled one")
    return True


def take_over(planned: PlannedStep, profile: Profile, limit_bytes: int, limits: Limits) -> bool:
    """Add to a profile the memory that a step with a new profile needs more. Return whether this was done.

    It is not done if no node needs more by over `growth_share` of the limit, or if no plan would keep the limit.

    Parameters
    ----------
    planned
        Its profile is replaced.
    profile
        Has as many nodes. Only nodes that need more count; the new step may lack what others need, such as a loss
        that is computed in some steps only.
    """
    known = planned.profile
    held = planned.held.raised_to(profile.held)
    before, now = (PlannedStep(limits, each, planned.link, held).trace().base_bytes for each in (known, profile))
    more = [max(0, b - a) for a, b in zip(before, now, strict=True)]
    if max(more, default=0) <= limits.growth_share * limit_bytes:
        return False
    base_bytes = tuple(map(sum, zip(known.trace.base_bytes, more, strict=True)))
    planned.profile = replace(known, trace=replace(known.trace, base_bytes=base_bytes))
    words = (
        f"a step needs up to {format_bytes(max(more))} more memory than the profiled one, so memory_limit "
        f"({format_bytes(limit_bytes)}) may have been exceeded"
    )
    if (least_bytes := least_feasible_limit(planned.trace())) > limit_bytes:
        planned.profile = known
        log.warning("%s; no plan keeps it now: the least limit is %s", words, format_bytes(least_bytes))
        return False
    log.warning("%s; it is planned again", words)
    return True
