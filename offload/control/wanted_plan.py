"""The plan that the caller's arguments ask for.

Beside the data path: between the controller, which knows when a plan is due, and the planner.
"""

from __future__ import annotations

from offload.control.limits import Limits
from offload.options import Options
from offload.plan import Link, Plan, cut_bound, fastest_plan, least_memory_plan, manual_plan
from offload.plan.trace import Trace

__all__ = ["wanted_plan"]


def wanted_plan(trace: Trace, link: Link, options: Options, device_bytes: int, limits: Limits) -> Plan:
    """Plan as the caller asked for. Tensors are recomputed only where that gains more than a measurement's noise.

    Parameters
    ----------
    trace
        The step, with the recipes that have been proven.
    link
        The link.
    options
        What the caller asked for.
    device_bytes
        Memory of the device.
    limits
        Its `noise` is the gain that is not worth a change.

    Raises
    ------
    InfeasibleLimitError
        No plan keeps the memory limit.
    """
    if options.n_tensors is not None:
        return manual_plan(trace, link, options.n_tensors, "auto", limit_bytes=device_bytes)
    plan = _plan(trace, link, options, recompute=True)
    if not plan.recomputes:
        return plan
    threshold = 1 - limits.noise
    if options.max_slowdown is None and plan.expected_seconds < threshold * cut_bound(trace, plan.limit_bytes, link):
        return plan  # no plan that swaps alone comes near
    alone = _plan(trace, link, options, recompute=False)
    is_faster = plan.expected_seconds < threshold * alone.expected_seconds and plan.peak_bytes <= max(
        alone.peak_bytes, options.memory_limit or 0
    )
    is_smaller = options.max_slowdown is not None and plan.peak_bytes < threshold * alone.peak_bytes
    return plan if is_faster or is_smaller else alone


def _plan(trace: Trace, link: Link, options: Options, *, recompute: bool) -> Plan:
    if options.max_slowdown is not None:
        return least_memory_plan(trace, link, options.max_slowdown, options.memory_limit, recompute=recompute)
    assert options.memory_limit is not None
    return fastest_plan(trace, link, options.memory_limit, recompute=recompute)
