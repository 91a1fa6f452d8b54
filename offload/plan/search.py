"""The planner: the fastest plan within a limit, the least memory within a slowdown, or the plan set by hand.

Place on the data path: trace and link in, plan out. Deterministic: the same trace and knobs give the same plan.

Which set of tensors swaps decides the step time; `schedule` does the rest. Sets are taken first from a few orders
(longest-lived first, latest needed first, idle time times bytes, bytes): the smallest prefix that keeps the limit, the
same with what the limit does not need left out, and longer prefixes, which buy freedom in time. The fastest is then
improved by small changes. For a few tensors every set is tried.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

from offload.plan.bounds import check_limit, cut_bounds, least_feasible_limit
from offload.plan.local_search import Effort, improve, reorder
from offload.plan.placement import Schedule, Step
from offload.plan.result import Plan, make_plan
from offload.plan.simulate import Link, Swap
from offload.plan.trace import Trace

__all__ = ["fastest_plan", "least_memory_plan", "manual_plan"]

_EFFORT_SECONDS = 0.6  # nominal; per 1,000 tensors, and at least once
_PROBE_SECONDS = 0.03  # the same, for one limit of many
_STARTS = 2  # independent runs of improvement
_EXHAUSTIVE_MAX = 12  # tensors; 4,096 sets
_EXHAUSTIVE_PROBE_MAX = 8
_LIMITS_MAX = 16  # limits tried by bisection
_PRESS_ON = (0.02, 0.005, 0.001)  # of the way down to the least limit, tried where bisection ended
_LEADS = (2.0, 1.5, 1.2)  # how much slower than assumed the link may be without a stall, where memory allows
_ROUNDING = 1e-12  # relative


def fastest_plan(trace: Trace, link: Link, limit_bytes: int) -> Plan:
    """Return the fastest plan found that never exceeds a limit.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Hard limit on the resident bytes.

    Returns
    -------
    Plan
        Without swaps where the step fits as it is.

    Raises
    ------
    ValueError
        If the limit is not positive.
    InfeasibleLimitError
        If no swap-only plan keeps the limit.

    Examples
    --------
    >>> from offload.plan.trace import Node, SavedTensor, Trace
    >>> nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    >>> trace = Trace(nodes, (5, 5, 5, 5, 5, 5), (SavedTensor(7, 10, 0, 0, 0, 5, 5), SavedTensor(8, 4, 2, 2, 2, 3, 3)))
    >>> plan = fastest_plan(trace, Link(10.0, 10.0), limit_bytes=15)
    >>> plan.swaps, plan.step_seconds, plan.peak_bytes
    ((Swap(id=7, release=2, prefetch=4),), 6.0, 15)
    """
    _check_positive(limit_bytes)
    check_limit(trace, limit_bytes)
    step = Step(trace, link)
    bounds = cut_bounds(trace, limit_bytes, link)
    target = max(bounds.double, step.compute_seconds)
    schedule = _fastest(step, limit_bytes, target, Effort(_effort_seconds(step)), _EXHAUSTIVE_MAX)
    assert schedule is not None  # check_limit has said that the set of all tensors keeps the limit
    swaps = step.swaps(_hasten(step, schedule, limit_bytes))
    return make_plan(trace, link, swaps, limit_bytes, bound_seconds=bounds.single)


def least_memory_plan(trace: Trace, link: Link, max_slowdown: float, limit_bytes: int | None = None) -> Plan:
    """Return the plan of least memory found whose step takes at most a given factor longer than the unswapped one.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    max_slowdown : float
        0.05 allows a step that is 5 % longer than without swaps, by waiting and by what swaps slow down.
    limit_bytes : int, optional
        Hard limit on the resident bytes. Where the slowdown does not suffice to keep it, the fastest plan within
        the limit is returned, with a warning.

    Returns
    -------
    Plan
        Its bound is about its own peak.

    Raises
    ------
    ValueError
        If `max_slowdown` is negative or no number, or the limit is not positive.
    InfeasibleLimitError
        If no swap-only plan keeps `limit_bytes`.
    """
    if not (math.isfinite(max_slowdown) and max_slowdown >= 0):
        raise ValueError(f"max_slowdown: {max_slowdown} is not understood; write a fraction of at least 0 such as 0.05")
    if limit_bytes is not None:
        _check_positive(limit_bytes)
        check_limit(trace, limit_bytes)
    step = Step(trace, link)
    allowed = step.compute_seconds * (1 + max_slowdown) * (1 + _ROUNDING)
    schedule = _least_memory(step, allowed)
    plan = make_plan(trace, link, step.swaps(schedule))
    if limit_bytes is not None and plan.peak_bytes > limit_bytes:
        plan = fastest_plan(trace, link, limit_bytes)
        slowdown = plan.expected_seconds / plan.compute_seconds - 1
        warnings.warn(f"max_slowdown: {max_slowdown:.3g} asked, the limit costs {slowdown:.3g}", stacklevel=2)
    return plan


def manual_plan(
    trace: Trace,
    link: Link,
    n_tensors: int,
    lead_nodes: int | Literal["auto"] = "auto",
    limit_bytes: int | None = None,
) -> Plan:
    """Return the plan that `n_tensors` and `lb` mean.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    n_tensors : int
        How many tensors swap, longest-lived first (most nodes between last use in forward and first use in
        backward): -1 all, 0 none.
    lead_nodes : int or "auto", default "auto"
        Backward nodes between the start of a copy-in and its use. "auto" chooses for each tensor the latest start
        that causes no stall, and leaves out tensors that are used again before they have left.
    limit_bytes : int, optional
        Warn if the plan exceeds it.

    Returns
    -------
    Plan
        Tensors leave as soon as they can without a stall, at the latest when they return.

    Raises
    ------
    ValueError
        If `n_tensors` is less than -1, or `lead_nodes` negative.
    """
    if n_tensors < -1:
        raise ValueError(f"n_tensors: {n_tensors} is not understood; write -1 for all, 0 for none, or how many")
    if lead_nodes != "auto" and lead_nodes < 0:
        raise ValueError(f'lb: {lead_nodes} is negative; write a number of backward nodes of at least 0, or "auto"')
    step = Step(trace, link)
    count = step.count if n_tensors == -1 else min(n_tensors, step.count)
    unlimited = int(step.kept.max(initial=0)) + 1
    chosen = _orders(step)[0][:count]
    if lead_nodes == "auto":
        schedule = step.schedule(chosen, unlimited)
        assert schedule is not None  # nothing is slower than infinitely slow, or larger than unlimited
        swaps = step.swaps(schedule)
    else:
        swaps = _fixed_lead(step, chosen, lead_nodes, unlimited)
    plan = make_plan(trace, link, swaps)
    if limit_bytes is not None and plan.peak_bytes > limit_bytes:
        warnings.warn(
            f"n_tensors={n_tensors}: the peak will be {plan.peak_bytes} bytes, the limit is {limit_bytes} bytes; "
            "raise n_tensors, lower lb, or give memory_limit alone",
            stacklevel=2,
        )
    return plan


def _fixed_lead(step: Step, chosen: Sequence[int], lead_nodes: int, unlimited: int) -> tuple[Swap, ...]:
    backward = [k for k, node in enumerate(step.trace.nodes) if node.backward]
    place = {k: at for at, k in enumerate(backward)}
    releases = step.earliest_releases(chosen, unlimited)
    swaps = []
    for i in chosen:
        back = step.back_at[i]
        prefetch = back
        if lead_nodes and back in place:
            prefetch = backward[max(0, place[back] - lead_nodes)]
        prefetch = max(prefetch, step.free_from[i])
        swaps.append(Swap(step.ids[i], min(releases[i], prefetch), prefetch))
    return tuple(sorted(swaps))


def _least_memory(step: Step, allowed: float) -> Schedule:
    """Bisect the limit, then press on with more effort where bisection ended."""
    low, high = least_feasible_limit(step.trace), int(step.kept.max(initial=0))
    best = Schedule(step.compute_seconds, (), (), (), ())
    weight = max(1.0, step.count / 1000)
    floor = low
    for _ in range(_LIMITS_MAX):
        if high - floor <= max(1, high // 2000):
            break
        limit = floor if high - floor < 2 else (floor + high) // 2
        found = _fastest(step, limit, allowed, Effort(_PROBE_SECONDS * weight), _EXHAUSTIVE_PROBE_MAX)
        if found is not None and found.step_seconds <= allowed:
            best, high = found, limit
        else:
            floor = limit
    share = _effort_seconds(step) / (len(_PRESS_ON) + 1)
    for limit in (low, *(int(high - part * (high - low)) for part in _PRESS_ON)):
        if limit < high:
            found = _fastest(step, limit, allowed, Effort(share), _EXHAUSTIVE_PROBE_MAX)
            if found is not None and found.step_seconds <= allowed:
                best, high = found, limit
    if high == low and best.numbers:  # no less memory is possible: spend what is left on time
        best = improve(step, low, best, step.compute_seconds, Effort(share))
    return _hasten(step, best, high, allowed) if best.numbers else best


def _fastest(
    step: Step, limit_bytes: int, target_seconds: float, effort: Effort, exhaustive_max: int
) -> Schedule | None:
    """Return the fastest schedule found; one within `target_seconds` is good enough."""
    nothing = Schedule(step.compute_seconds, (), (), (), ())
    if step.kept.max(initial=0) <= limit_bytes:
        return nothing
    target_seconds *= 1 + _ROUNDING
    small = step.count <= exhaustive_max
    best: Schedule | None = None
    for numbers in _subsets(step.count) if small else _guesses(step, limit_bytes):
        worth = best.step_seconds if best else math.inf
        found = step.schedule(numbers, limit_bytes, worth)
        if found is not None and small:
            found = reorder(step, limit_bytes, found, worth, effort)
        effort.spend(step, len(numbers))
        if found is not None and (best is None or found.step_seconds < best.step_seconds):
            best = found
            if best.step_seconds <= target_seconds:
                break
        if not small and best is not None and effort.seconds < 0:
            break
    if best is None or small:
        return best
    start, share = best, effort.seconds / _STARTS
    for seed in range(_STARTS):
        if best.step_seconds <= target_seconds:
            break
        improved = improve(step, limit_bytes, start, target_seconds, Effort(share), seed=seed)
        best = min(best, improved, key=lambda schedule: schedule.step_seconds)
    return best


def _subsets(count: int) -> Iterator[list[int]]:
    """Yield every set of tensors, small sets of early tensors first."""
    for mask in range(1 << count):
        yield [i for i in range(count) if mask >> i & 1]


def _guesses(step: Step, limit_bytes: int) -> Iterator[Sequence[int]]:
    """Yield sets worth scheduling, the most promising first."""
    ranked = []
    for order in _orders(step):
        least = _least_prefix(step, order, limit_bytes)
        ranked.append((order, least))
        yield order[:least]
    for order, least in ranked:
        yield _needed(step, order, limit_bytes)
        rest = step.count - least
        for more in sorted({2, 5, 10, rest // 8, rest // 3}):
            if 0 < more <= rest:
                yield order[: least + more]


def _orders(step: Step) -> list[list[int]]:
    everything = range(step.count)
    idle = [step.clock[step.back_at[i]] - step.clock[step.packed[i] + 1] for i in everything]
    return [
        sorted(everything, key=lambda i: (step.free_from[i] - step.back_at[i], i)),
        list(everything),
        sorted(everything, key=lambda i: (-step.back_at[i], i)),
        sorted(everything, key=lambda i: (-idle[i] * step.bytes[i], i)),
        sorted(everything, key=lambda i: (-step.bytes[i], i)),
    ]


def _least_prefix(step: Step, order: Sequence[int], limit_bytes: int) -> int:
    """Return the length of the shortest prefix that keeps the limit, or of all where none does."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if int(step.room(order[:middle], limit_bytes).min()) >= 0:
            high = middle
        else:
            low = middle + 1
    return low


def _needed(step: Step, order: Sequence[int], limit_bytes: int) -> list[int]:
    """Return what is left of all tensors when, from the order's end, each for which there is room is kept."""
    room = step.room(order, limit_bytes)
    needed = []
    for i in reversed(order):
        span = room[step.free_from[i] : step.back_at[i]]
        if span.size and int(span.min()) < step.bytes[i]:
            needed.append(i)
        else:
            span -= step.bytes[i]
    return needed


def _hasten(step: Step, schedule: Schedule, limit_bytes: int, allowed: float = 0.0) -> Schedule:
    """Let copy-ins begin earlier where memory allows and nothing is lost: a slower link then does no harm."""
    for lead in _LEADS:
        found = step.schedule(schedule.numbers, limit_bytes, lead=lead)
        if found is not None and found.step_seconds <= max(schedule.step_seconds, allowed):
            return found
    return schedule


def _effort_seconds(step: Step) -> float:
    return _EFFORT_SECONDS * max(1.0, step.count / 1000)


def _check_positive(limit_bytes: int) -> None:
    if limit_bytes <= 0:
        raise ValueError(f'memory_limit: {limit_bytes} is not positive; write a size such as "8GiB"')
