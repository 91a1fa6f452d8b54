"""Makes plans: the fastest within a memory limit, the one of lowest peak within a slowdown, or that of the manual mode.

The search is deterministic: the same trace, link and options give the same plan.

`swap_search` chooses the set of tensors to swap, and `placement` chooses their nodes. If tensors have recipes,
`joint_search` also chooses the set to recompute. Within the same limit, its plan is never slower than the swap-only
plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from offload.plan.bounds import check_limit, cut_bounds, least_feasible_limit
from offload.plan.joint_bounds import joint_bound
from offload.plan.joint_search import JointPlacement, fastest_joint, small_share
from offload.plan.local_search import SearchBudget, improve
from offload.plan.placement import Step, SwapPlacement
from offload.plan.recompute import has_recipes
from offload.plan.result import Plan, make_plan
from offload.plan.simulate import Link, Swap
from offload.plan.swap_search import ROUNDING, fastest_placement, rankings
from offload.plan.trace import Trace

__all__ = ["fastest_plan", "least_memory_plan", "manual_plan"]

# Search budgets, in estimated seconds (see `SearchBudget`), for up to 1,000 tensors. With n > 1,000 tensors, a budget
# grows as n if the search is swap-only, and as n**0.4 if it includes recomputation.
_BUDGET_SECONDS = 0.6  # swap-only search
_PROBE_SECONDS = 0.03  # swap-only search, for each limit of a bisection and before a search with recomputation
_JOINT_SECONDS = 2.0  # search with recomputation
_JOINT_PROBE_SECONDS = 0.1  # search with recomputation, for each limit of a bisection
_JOINT_LOWER_SECONDS = 0.4  # search with recomputation, for each limit after a bisection
_EXHAUSTIVE_MAX = 12  # with at most 12 tensors, a search tries every set of them (4,096)
_EXHAUSTIVE_PROBE_MAX = 8  # the same, for each limit of `least_memory_plan` and for the search before recomputation
_LIMITS_MAX = 16  # limits tried by bisection
# After the bisection, lower limits are tried: first the least feasible one, then some close to the bisection's result.
# The latter are: result - share × (result - least feasible limit), for each of these shares.
_LOWER_LIMITS = (0.02, 0.005, 0.001)
_SAFETY_FACTORS = (2.0, 1.5, 1.2)  # tried in this order for the final placement; see `Step.place`


def fastest_plan(trace: Trace, link: Link, limit_bytes: int, *, recompute: bool = True, effort: float = 1.0) -> Plan:
    """Return the fastest plan found within a limit.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Hard limit on the resident bytes, in bytes.
    recompute : bool, default True
        Whether tensors that have a recipe may be recomputed; otherwise tensors are only swapped.
    effort : float, default 1.0
        The share of the usual time that the search may take, from 0 to 1.

    Returns
    -------
    Plan
        Without swaps if the step fits without them; with recomputation only if that is faster.

    Raises
    ------
    ValueError
        If the limit is not positive.
    InfeasibleLimitError
        If no plan stays within the limit. Recomputation does not lower the least feasible limit.

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
    if recompute and has_recipes(trace):
        bound = joint_bound(trace, limit_bytes, link)
        best = _fastest_joint(trace, step, limit_bytes, target, bound, bounds.double, effort)
        swaps = best.step.swaps(_prefetch_earlier(best.step, best.placement, limit_bytes))
        return make_plan(trace, link, swaps, limit_bytes, bound_seconds=bound, recomputes=best.dropped)
    placement = _fastest_swaps(step, limit_bytes, target, SearchBudget(effort * _budget_seconds(step), effort))
    swaps = step.swaps(_prefetch_earlier(step, placement, limit_bytes))
    return make_plan(trace, link, swaps, limit_bytes, bound_seconds=bounds.single)


def least_memory_plan(
    trace: Trace,
    link: Link,
    max_slowdown: float,
    limit_bytes: int | None = None,
    *,
    recompute: bool = True,
    effort: float = 1.0,
) -> Plan:
    """Search for the plan with the lowest peak memory whose step is at most `max_slowdown` longer, and return it.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    max_slowdown : float
        0.05 allows a step that is 5 % longer than without swaps, including waits, overhead and recomputation.
    limit_bytes : int, optional
        Hard limit on the resident bytes, in bytes. If no plan within `max_slowdown` meets the limit, the fastest plan
        within the limit is returned, with a warning.
    recompute : bool, default True
        Whether tensors that have a recipe may be recomputed; otherwise tensors are only swapped.
    effort : float, default 1.0
        The share of the usual time that the search may take, from 0 to 1.

    Returns
    -------
    Plan
        Its lower bound on the step time is computed for a limit equal to the plan's own peak. If `max_slowdown` cannot
        be met, the bound is computed for `limit_bytes`.

    Raises
    ------
    ValueError
        If `max_slowdown` is negative or not finite, or the limit is not positive.
    InfeasibleLimitError
        If no plan stays within `limit_bytes`.
    """
    if not (math.isfinite(max_slowdown) and max_slowdown >= 0):
        raise ValueError(f"max_slowdown: {max_slowdown} is not understood; write a fraction of at least 0 such as 0.05")
    if limit_bytes is not None:
        _check_positive(limit_bytes)
        check_limit(trace, limit_bytes)
    step = Step(trace, link)
    allowed = step.compute_seconds * (1 + max_slowdown) * (1 + ROUNDING)
    recompute = recompute and has_recipes(trace)
    best = _least_memory(trace, step, allowed, recompute=recompute, effort=effort)
    plan = make_plan(trace, link, best.step.swaps(best.placement), recomputes=best.dropped if recompute else None)
    if limit_bytes is not None and plan.peak_bytes > limit_bytes:
        plan = fastest_plan(trace, link, limit_bytes, recompute=recompute, effort=effort)
        slowdown = plan.expected_seconds / plan.compute_seconds - 1
        warnings.warn(
            f"max_slowdown={max_slowdown:.3g} is not met within memory_limit by any prediction: steps of the fastest "
            f"plan would be {slowdown:.1%} slower than without swapping; raise one of the two",
            stacklevel=2,
        )
    return plan


def manual_plan(
    trace: Trace,
    link: Link,
    n_tensors: int,
    lead_nodes: int | Literal["auto"] = "auto",
    limit_bytes: int | None = None,
) -> Plan:
    """Return the plan for `n_tensors` and `lb`, the options of the manual mode.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    n_tensors : int
        Number of tensors to swap; -1 swaps all, 0 none. Tensors with the most nodes between their last use in forward
        and their first use in backward are chosen first.
    lead_nodes : int or "auto", default "auto"
        Backward nodes between the prefetch and the first use in backward (`lb`). "auto" prefetches each tensor as
        late as is possible without a stall, and swaps no tensor whose prefetch would be at or before its release.
    limit_bytes : int, optional
        Limit on the resident bytes, in bytes; a plan that exceeds it is returned with a warning.

    Returns
    -------
    Plan
        A tensor's release node is the first one that starts after the end of its copy-out and of its last use in
        forward, but no later than its prefetch node.

    Raises
    ------
    ValueError
        If `n_tensors` is less than -1, or `lead_nodes` negative.
    """
    if n_tensors < -1:
        raise ValueError(
            f"n_tensors: {n_tensors} is not understood; write -1 for all, 0 for none, or a number of tensors"
        )
    if lead_nodes != "auto" and lead_nodes < 0:
        raise ValueError(f'lb: {lead_nodes} is negative; write a number of backward nodes of at least 0, or "auto"')
    step = Step(trace, link)
    count = step.count if n_tensors == -1 else min(n_tensors, step.count)
    unlimited = int(step.unswapped_bytes.max(initial=0)) + 1
    chosen = rankings(step)[0][:count]
    if lead_nodes == "auto":
        placement = step.place(chosen, unlimited)
        assert placement is not None  # the limit is above the unswapped peak, and the step may take any time
        swaps = step.swaps(placement)
    else:
        swaps = _fixed_lead(trace, step, chosen, lead_nodes, unlimited)
    plan = make_plan(trace, link, swaps)
    if limit_bytes is not None and plan.peak_bytes > limit_bytes:
        warnings.warn(
            f"n_tensors={n_tensors}: the peak will be {plan.peak_bytes} bytes, the limit is {limit_bytes} bytes; "
            "raise n_tensors, lower lb, or use memory_limit instead of n_tensors and lb",
            stacklevel=2,
        )
    return plan


def _fixed_lead(trace: Trace, step: Step, chosen: Sequence[int], lead_nodes: int, unlimited: int) -> tuple[Swap, ...]:
    backward = [k for k, node in enumerate(trace.nodes) if node.backward]
    position = {k: at for at, k in enumerate(backward)}
    releases = step.releases(chosen, unlimited)
    swaps = []
    for i in chosen:
        use = prefetch = step.first_backward[i]
        if lead_nodes and use in position:
            prefetch = backward[max(0, position[use] - lead_nodes)]
        prefetch = max(prefetch, step.release_min[i])
        swaps.append(Swap(step.ids[i], min(releases[i], prefetch), prefetch))
    return tuple(sorted(swaps))


def _least_memory(trace: Trace, step: Step, allowed: float, *, recompute: bool, effort: float) -> JointPlacement:
    """Return the placement with the lowest peak found whose step takes at most `allowed` seconds.

    Bisects the limit, with a small search budget for each try; then tries lower limits with a larger budget.
    """
    low, high = least_feasible_limit(trace), int(step.unswapped_bytes.max(initial=0))
    best = JointPlacement(frozenset(), step, SwapPlacement(step.compute_seconds, (), (), (), ()))
    weight = max(1.0, step.count / 1000)
    floor = low

    def fastest(limit: int, seconds: float, joint_seconds: float) -> JointPlacement:
        budget = SearchBudget(effort * seconds, effort)
        placement = _fastest_swaps(step, limit, allowed, budget, _EXHAUSTIVE_PROBE_MAX)
        found = JointPlacement(frozenset(), step, placement)
        if not recompute or found.step_seconds <= allowed:
            return found
        budget = SearchBudget(effort * _joint_seconds(step, joint_seconds), effort)
        return fastest_joint(trace, step.link, limit, found, allowed, budget, guess=sorted(best.dropped))

    for _ in range(_LIMITS_MAX):
        if high - floor <= max(1, high // 2000):
            break
        limit = floor if high - floor < 2 else (floor + high) // 2
        found = fastest(limit, _PROBE_SECONDS * weight, _JOINT_PROBE_SECONDS)
        if found.step_seconds <= allowed:
            best, high = found, limit
        else:
            floor = limit
    share = _budget_seconds(step) / (len(_LOWER_LIMITS) + 1)
    for limit in (low, *(int(high - part * (high - low)) for part in _LOWER_LIMITS)):
        if limit < high:
            found = fastest(limit, share, _JOINT_LOWER_SECONDS)
            if found.step_seconds <= allowed:
                best, high = found, limit
    if not best.placement.indices:
        return best
    placement = best.placement
    if high == low:  # the least feasible limit is reached: the budget that is left is spent on shortening the step
        placement = improve(best.step, low, placement, step.compute_seconds, SearchBudget(effort * share, effort))
    return replace(best, placement=_prefetch_earlier(best.step, placement, high, allowed))


def _fastest_swaps(
    step: Step, limit_bytes: int, target_seconds: float, budget: SearchBudget, exhaustive_max: int = _EXHAUSTIVE_MAX
) -> SwapPlacement:
    placement = fastest_placement(step, limit_bytes, target_seconds, budget, exhaustive_max)
    assert placement is not None  # the limit is feasible: swapping all tensors keeps it
    return placement


def _fastest_joint(
    trace: Trace,
    step: Step,
    limit_bytes: int,
    target_seconds: float,
    bound_seconds: float,
    swap_bound_seconds: float,
    effort: float,
) -> JointPlacement:
    """Return the fastest placement found, with or without recomputation.

    The search begins with a quick swap-only plan, then adds recomputation. A thorough swap-only search follows, unless
    the result is already as fast as the lower bound for swap-only plans. So the result is never slower than the
    swap-only plan.
    """
    seconds = _PROBE_SECONDS * max(1.0, step.count / 1000) * small_share(trace)
    budget = SearchBudget(effort * seconds, effort)
    quick = _fastest_swaps(step, limit_bytes, target_seconds, budget, _EXHAUSTIVE_PROBE_MAX)
    best = JointPlacement(frozenset(), step, quick)
    budget = SearchBudget(effort * _joint_seconds(step, _JOINT_SECONDS), effort)
    best = fastest_joint(trace, step.link, limit_bytes, best, bound_seconds, budget)
    if best.step_seconds > swap_bound_seconds:
        budget = SearchBudget(effort * _budget_seconds(step), effort)
        thorough = _fastest_swaps(step, limit_bytes, target_seconds, budget)
        if thorough.step_seconds <= best.step_seconds:
            best = JointPlacement(frozenset(), step, thorough)
    return best


def _prefetch_earlier(
    step: Step, placement: SwapPlacement, limit_bytes: int, allowed_seconds: float = 0.0
) -> SwapPlacement:
    """Prefetch earlier if memory allows it, so that a slower link causes no stall.

    The step then takes no longer than before, or at most `allowed_seconds` if that is more.
    """
    for safety_factor in _SAFETY_FACTORS:
        found = step.place(placement.indices, limit_bytes, safety_factor=safety_factor)
        if found is not None and found.step_seconds <= max(placement.step_seconds, allowed_seconds):
            return found
    return placement


def _budget_seconds(step: Step) -> float:
    return _BUDGET_SECONDS * max(1.0, step.count / 1000)


def _joint_seconds(step: Step, seconds: float) -> float:
    return float(seconds * max(1.0, step.count / 1000) ** 0.4)


def _check_positive(limit_bytes: int) -> None:
    if limit_bytes <= 0:
        raise ValueError(f'memory_limit: {limit_bytes} is not positive; write a size such as "8GiB"')
