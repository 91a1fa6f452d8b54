"""Profiles a step again now and then if memory is limited: code outside of the model may need more than it did.

Hooks see what a step saves in the model's forward, and in `with handle.step():`. So a change there is noticed at once.
But a loss that is computed elsewhere may begin to need more memory, and neither torch nor malloc reports this on the
CPU.
"""

from __future__ import annotations

import logging

from offload.control.limits import Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.profiling.profiler import Profile

__all__ = ["is_due", "needs_more"]

log = logging.getLogger("offload")


def is_due(state: SignatureState, planned: PlannedStep, options: Options, limits: Limits) -> bool:
    """Return whether the step that begins is to be profiled again.

    With `memory_limit`, these are the steady ones of the steps r, 3 × r, 7 × r, 15 × r, … after the first plan, and one
    in `recheck_steps_max` steps later; r is half of `recheck_steps`. (`Watch` compares in other steps.)
    """
    if options.memory_limit is None or state.phase is not Phase.STEADY or state.profiler is not None:
        return False
    number = planned.steps + limits.recheck_steps // 2
    times, rest = divmod(number, limits.recheck_steps)
    return rest == 0 and times > 0 and (times & (times - 1) == 0 or number % limits.recheck_steps_max == 0)


def needs_more(planned: PlannedStep, profile: Profile, options: Options, limits: Limits) -> bool:
    """Return whether the step as it was profiled again needs more memory than its plan assumes.

    A difference of `noise` times the limit does not count. An incomplete profile does not count either.
    """
    if not profile.knows_temporaries or options.memory_limit is None:
        return False
    known, found = planned.trace().base_bytes, profile.trace.base_bytes
    if len(known) == len(found):
        more = max((b - a for a, b in zip(known, found, strict=True)), default=0)
    else:  # backward has run in another order
        more = max(found, default=0) - max(known, default=0)
    if more <= limits.noise * options.memory_limit:
        return False
    log.info("planning again: code outside of the model needs more memory than in the profiled step")
    return True
