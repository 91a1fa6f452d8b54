"""Compares a new profile of a step with the earlier one, if the step may need more memory than it did (`PeakWatch`)."""

from __future__ import annotations

import logging
from dataclasses import replace

from offload.control.limits import Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import InfeasibleLimitError
from offload.profiling.profiler import Profile, Profiler
from offload.units import format_bytes

__all__ = ["compare_again", "restore_profile", "take_over"]

log = logging.getLogger("offload")


def compare_again(
    state: SignatureState, profile: Profile, profiler: Profiler, options: Options, limits: Limits
) -> bool:
    """Compare a new profile with the doubted one, if there is one, and go on with the doubted one.

    If the step needs more memory, the doubted profile gets it, and the signature is planned again. If the new profile
    cannot be compared, the next step is profiled, at most `incomplete_profiles` times.

    Returns
    -------
    bool
        False if the new profile is to be used as usual: there is no doubted one, or it has other nodes.
    """
    planned, limit_bytes = state.doubted, options.memory_limit
    if planned is None or limit_bytes is None:
        return False
    has_other_nodes = len(profile.trace.nodes) != len(planned.profile.trace.nodes)
    # Another step that began before the backward of this one has used memory of its own.
    is_usable = profile.knows_temporaries and not profiler.stopwatch.is_disturbed and profiler.is_alone
    if not is_usable and not has_other_nodes:
        state.comparisons += 1
        if state.comparisons < limits.incomplete_profiles:
            return True
        log.info("a step may need more memory than it did; it could not be compared with its profile")
    state.doubted = None
    if has_other_nodes:
        return False
    state.planned = planned
    if is_usable and take_over(planned, profile, limit_bytes, limits):
        planned.restart_search()
        state.enter(Phase.PLANNING, "the step needs more memory than the profiled one")
    else:
        state.enter(Phase.MEASURING, "the plan stays")
    return True


def take_over(planned: PlannedStep, profile: Profile, limit_bytes: int, limits: Limits) -> bool:
    """Raise the memory in a profile to that of a later step, if a node needs over `growth_share` of the limit more.

    Parameters
    ----------
    planned
        Its `profile` is replaced, and its `known` set to what it was.
    profile
        Of the later step, with as many nodes. A node that needs less changes nothing: the step may lack a loss that
        only some steps compute.

    Returns
    -------
    bool
        Whether the profile has changed.
    """
    known = planned.profile
    held = planned.held.raised_to(profile.held)
    before, now = (PlannedStep(limits, each, planned.link, held).trace().base_bytes for each in (known, profile))
    more = [max(0, b - a) for a, b in zip(before, now, strict=True)]
    if max(more, default=0) <= limits.growth_share * limit_bytes:
        return False
    base_bytes = tuple(map(sum, zip(known.trace.base_bytes, more, strict=True)))
    planned.profile, planned.known = replace(known, trace=replace(known.trace, base_bytes=base_bytes)), known
    log.warning(
        "a step needs up to %s more memory than the profiled one, so memory_limit (%s) may have been exceeded; it is "
        "planned again",
        format_bytes(max(more)),
        format_bytes(limit_bytes),
    )
    return True


def restore_profile(planned: PlannedStep, error: InfeasibleLimitError) -> bool:
    """Restore the profile before `take_over`, because no plan keeps the limit with the raised one.

    The steps go on with their plan: they have exceeded the limit already, and a training should not end because of it.

    Returns
    -------
    bool
        False if the profile had not been raised: then the error is to be raised.
    """
    if planned.known is None:
        return False
    planned.profile, planned.known = planned.known, None
    log.warning(
        "no plan keeps memory_limit (%s) any more, so steps exceed it; the least limit is %s",
        format_bytes(error.limit_bytes),
        format_bytes(error.least_limit_bytes),
    )
    return True
