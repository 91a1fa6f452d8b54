"""Makes the next plan of a step: the first one, or with `max_slowdown` that of a search."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from offload.control.earlier_search import EarlierSearches
from offload.control.limits import Limits
from offload.control.planned_step import PlannedStep
from offload.control.tried_plan import TriedPlan, most_promising
from offload.control.wanted_plan import wanted_plan
from offload.options import Options, device_bytes
from offload.plan import Plan, least_feasible_limit, make_plan
from offload.plan.trace import Trace
from offload.units import format_bytes

__all__ = ["goes_too_far", "is_worth_trying", "next_plan"]

log = logging.getLogger("offload")


def next_plan(
    planned: PlannedStep,
    trace: Trace,
    options: Options,
    limits: Limits,
    device: torch.device,
    earlier: EarlierSearches | None = None,
) -> Plan | None:
    """Return the next plan. None if the search for one that keeps `max_slowdown` is to end.

    If no plan can save enough to be worth the time of its hooks, the search is settled, and the plan moves nothing.

    Parameters
    ----------
    planned
        The step, with its search.
    trace
        The profiled step with the present memory use.
    options
        The caller's arguments.
    limits
        Bounds and tolerances.
    device
        The device of the model.
    earlier
        Searches of earlier trainings. If one is known for this step, this search begins with one of its plans.

    Raises
    ------
    InfeasibleLimitError
        No plan keeps the memory limit.
    """
    search, allowed = planned.search, options.max_slowdown
    held_bytes = planned.recipes.held_bytes(planned.recipes.recompute) if planned.recipes is not None else 0
    make = partial(wanted_plan, trace, planned.link, limits=limits, held_bytes=held_bytes)
    make = partial(make, device_bytes=device_bytes(device))
    if allowed is None:
        return make(options=options)
    step_seconds = sum(node.seconds for node in trace.nodes)
    effort = limits.search_effort(step_seconds, len(trace.tensors), on_cpu=device.type == "cpu")
    search.is_settled = False
    least = least_feasible_limit(trace)
    kept = make_plan(trace, planned.link, ())
    if options.memory_limit is None and not limits.is_worth_hooks(least, kept.peak_bytes):
        search.is_settled = True  # no plan can save enough to be worth the time of its hooks
        return kept
    if search.tried:
        peak = max(search.wanted_peak(allowed), least)
        if options.memory_limit is not None:
            peak = min(peak, options.memory_limit)
        elif not limits.is_worth_hooks(peak, kept.peak_bytes):
            peak = max(least, int(limits.worthwhile_peak(kept.peak_bytes)))
            if not _may_keep(search.tried[-1], allowed, kept.peak_bytes - peak):
                return None  # a plan that keeps the promise would save too little
        plan = make(options=replace(options, max_slowdown=None, memory_limit=peak), effort=effort)
        if goes_too_far(plan, search.tried[-1], allowed):
            wanted = replace(options, max_slowdown=search.aim(allowed), memory_limit=None)
            plan = make(options=wanted, effort=limits.halved(effort))
            keeps_limit = options.memory_limit is None or plan.peak_bytes + held_bytes <= options.memory_limit
            if not (keeps_limit and is_worth_trying(plan, search.tried[-1].plan, limits)):
                return None
        # The search ends if this plan was tried already, or moves nothing.
        return plan if _is_new(plan, search.tried) else None
    begin = None if earlier is None else _from_earlier(planned, kept, allowed, limits, earlier)
    if begin is not None:
        return begin
    plan = make(options=replace(options, max_slowdown=allowed), effort=effort)
    if not (plan.swaps or plan.recomputes) and trace.tensors and planned.replans < limits.replans:
        # No plan with a predicted slowdown within `max_slowdown` moves tensors. The actual one may be smaller.
        wanted = replace(options, max_slowdown=limits.exploring * allowed)
        return make(options=wanted, effort=limits.halved(effort))
    return plan


def _from_earlier(
    planned: PlannedStep, kept: Plan, allowed: float, limits: Limits, earlier: EarlierSearches
) -> Plan | None:
    """Return the plan with which an earlier search lets this one begin; None if it knows none.

    This is the plan that it ended with. But if a plan that it rejected is worth measuring again, it is that one.
    """
    search = planned.search
    if search.is_anew or (found := earlier.find(kept.trace, planned.link)) is None:
        return None
    search.earlier = found.tried
    best = found.best
    gain_min = limits.earlier_gain * kept.peak_bytes
    begin = most_promising(found.tried, kept if best is None else best.plan, allowed, gain_min, limits) or best
    if begin is None:
        return None
    peak, slowdown = format_bytes(begin.plan.peak_bytes), f"{max(0.0, begin.measured):.1%}"
    log.info("beginning with a plan of an earlier search: its peak is %s, and it was %s slower", peak, slowdown)
    return begin.plan


def goes_too_far(plan: Plan, last: TriedPlan, max_slowdown: float) -> bool:
    """Return whether the last plan kept `max_slowdown`, but this one is predicted to exceed it.

    `PlanSearch.wanted_peak` assumes that the slowdown grows with the bytes saved. But near the least memory, steps also
    wait for copies. The prediction includes these waits. If more was predicted for the last plan than was measured, the
    difference is subtracted.
    """
    seconds = plan.expected_seconds - max(0.0, -last.unexplained_seconds)
    return last.slowdown_max <= max_slowdown and seconds > (1 + max_slowdown) * plan.compute_seconds


def is_worth_trying(plan: Plan, last: Plan, limits: Limits) -> bool:
    """Return whether the plan needs over `peak_step` less memory than the last one, or alone is worth its hooks."""
    if plan.peak_bytes < (1 - limits.peak_step) * last.peak_bytes:
        return True
    worth, last_worth = (limits.is_worth_hooks(each.peak_bytes, each.unswapped_peak_bytes) for each in (plan, last))
    return worth and not last_worth


def _may_keep(last: TriedPlan, max_slowdown: float, saved_bytes: int) -> bool:
    """Return whether a plan that saves `saved_bytes` may keep the promise, judged by the last plan.

    It may if the last plan kept it; or if the last plan's slowdown, scaled by the bytes saved, is at most
    `max_slowdown`.
    """
    return last.slowdown_max <= max_slowdown or saved_bytes * last.slowdown_max <= max_slowdown * last.saved_bytes


def _is_new(plan: Plan, tried: Iterable[TriedPlan]) -> bool:
    """Return whether the plan moves tensors, and no plan judged in this training moves the same at the same nodes."""
    moves = plan.swaps, plan.recomputes
    return any(moves) and all(each.is_earlier or moves != (each.plan.swaps, each.plan.recomputes) for each in tried)
