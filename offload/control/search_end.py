"""Chooses the plan that a search for `max_slowdown` ends with."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

from offload.control.limits import Limits
from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import Plan, make_plan
from offload.units import format_bytes

__all__ = ["last_plan"]

log = logging.getLogger("offload")


def last_plan(planned: PlannedStep, options: Options, limits: Limits) -> Plan:
    """Return the plan that the search ends with. Logs it if it is not the plan that was judged last.

    If a plan has been measured again, this is that plan if it keeps `max_slowdown`, and otherwise the plan that was
    followed before, even if its own estimate has changed since then: `Watch` compares it now and then.
    """
    allowed, search = options.max_slowdown, planned.search
    assert allowed is not None
    judged = search.tried[-1]
    if search.plan_before is None:
        plan = _best(planned, options.memory_limit, limits, allowed)
    else:
        plan = judged.plan if judged.slowdown_max <= allowed else search.plan_before
    if plan is not judged.plan:
        is_slow = judged.slowdown_max > allowed
        why = f"was {judged.in_words} slower than without swapping" if is_slow else "saves too little memory"
        peaks = format_bytes(plan.peak_bytes), format_bytes(judged.plan.peak_bytes)
        log.info("back to a plan with a peak of %s: the last one tried, with %s, %s", *peaks, why)
    kept = search.judged(plan)
    if kept is not None:
        log.info("the search ends with a plan that was %s slower than without swapping", kept.in_words)
    return plan


def _best(planned: PlannedStep, limit_bytes: int | None, limits: Limits, allowed: float) -> Plan:
    """Return the plan of least memory that kept the promise, if it saves enough (`is_worth_hooks`).

    Otherwise return the plan that moves nothing, if it stays within the memory limit. If it does not, return the
    plan of least memory that kept the promise, however little it saves. If no plan kept the promise, return the
    fastest of the tried plans.
    """
    search = planned.search
    best = search.best(allowed)
    if best is not None and limits.is_worth_hooks(best.peak_bytes, best.unswapped_peak_bytes):
        return best
    state = planned.plan.state if planned.plan is not None else None
    plan = replace(make_plan(planned.trace(), planned.link, ()), state=state)
    if limit_bytes is not None and plan.peak_bytes > limit_bytes:
        if best is not None:
            return best
        fastest = min(search.tried, key=lambda each: each.slowdown_max)
        warnings.warn(
            f"max_slowdown={allowed:.3g} is not met within memory_limit ({format_bytes(limit_bytes)}): steps of "
            f"the fastest plan tried were {fastest.in_words} slower than without swapping; raise one of the two",
            stacklevel=2,
        )
        return fastest.plan
    return plan
