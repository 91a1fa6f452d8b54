"""Makes the plan that the arguments of `offload.enable` ask for.

The controller calls `wanted_plan` when a plan is due.
"""

from __future__ import annotations

from dataclasses import replace

from offload.control.limits import Limits
from offload.options import Options
from offload.plan import (
    InfeasibleLimitError,
    Link,
    Plan,
    cut_bound,
    fastest_plan,
    least_feasible_limit,
    least_memory_plan,
    manual_plan,
)
from offload.plan.trace import Trace
from offload.runtime.disturbance import disturb

__all__ = ["wanted_plan"]


def wanted_plan(
    trace: Trace,
    link: Link,
    options: Options,
    device_bytes: int,
    limits: Limits,
    held_bytes: int = 0,
    effort: float = 1.0,
) -> Plan:
    """Return the plan that the arguments ask for. It recomputes only if the gain exceeds the noise of measurements.

    Parameters
    ----------
    trace
        The step. After a trial step it has recipes, the operators that recompute saved tensors.
    link
        The speed of copies to assume.
    options
        The caller's arguments.
    device_bytes
        Memory of the device.
    limits
        Tolerances; a gain of `noise` or less does not justify recomputation.
    held_bytes
        Upper bound on the bytes that recipes keep on the device until backward.
    effort
        The share of the usual time that the search may take.

    Raises
    ------
    InfeasibleLimitError
        No plan keeps the memory limit.
    """
    disturb()
    if options.n_tensors is not None:
        return manual_plan(trace, link, options.n_tensors, "auto", limit_bytes=device_bytes)
    if options.least_memory:
        least = max(1, least_feasible_limit(trace))
        options = replace(options, memory_limit=least)
        # What recipes hold may exceed the least limit by `noise`: otherwise nothing could be recomputed.
        held_bytes = 0 if held_bytes <= limits.noise * least else held_bytes
    try:
        plan = _plan(trace, link, options, recompute=True, held_bytes=held_bytes, effort=effort)
    except InfeasibleLimitError:
        plan = None
    if plan is None or not plan.recomputes:
        return _plan(trace, link, options, recompute=False, effort=effort) if plan is None or held_bytes else plan
    threshold = 1 - limits.noise
    if options.max_slowdown is None and plan.expected_seconds < threshold * cut_bound(
        trace, options.memory_limit or 0, link
    ):
        return plan  # every swap-only plan is slower by more than noise
    alone = _plan(trace, link, options, recompute=False, effort=effort)
    is_faster = plan.expected_seconds < threshold * alone.expected_seconds and plan.peak_bytes <= max(
        alone.peak_bytes, options.memory_limit or 0
    )
    is_smaller = options.max_slowdown is not None and plan.peak_bytes < threshold * alone.peak_bytes
    return plan if is_faster or is_smaller else alone


def _plan(
    trace: Trace, link: Link, options: Options, *, recompute: bool, held_bytes: int = 0, effort: float = 1.0
) -> Plan:
    limit_bytes = None if options.memory_limit is None else max(1, options.memory_limit - held_bytes)
    if options.max_slowdown is not None:
        return least_memory_plan(trace, link, options.max_slowdown, limit_bytes, recompute=recompute, effort=effort)
    assert limit_bytes is not None
    return fastest_plan(trace, link, limit_bytes, recompute=recompute, effort=effort)
