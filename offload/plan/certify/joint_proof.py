"""A tighter lower bound on the step time of plans that swap and recompute.

Users call it as `offload.plan.prove_joint`; the benchmarks compare plans and the joint bound with it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass

from offload.plan.bounds import check_limit
from offload.plan.certify.choices import DROPPED, SWAPPED, Choices
from offload.plan.certify.exact_placement import exact_placement
from offload.plan.joint_bounds import joint_bound
from offload.plan.placement import Step
from offload.plan.recompute import recomputed
from offload.plan.result import Plan, make_plan
from offload.plan.swap_search import minimal_set, rankings

__all__ = ["JointProof", "prove_joint"]

_RANKINGS = 3  # number of rankings whose minimal sets are tried as swaps for the dropped tensors of some choices


@dataclass(frozen=True, slots=True)
class JointProof:
    """A plan and a proven lower bound.

    Parameters
    ----------
    plan : Plan
        The incumbent, or a faster plan that was found meanwhile.
    bound_seconds : float
        Lower bound on the step time of every plan within the limit that swaps and recomputes, in seconds; at least
        `joint_bound`.
    """

    plan: Plan
    bound_seconds: float

    @property
    def gap(self) -> float:
        """Relative difference between step time and bound."""
        return self.plan.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


def prove_joint(plan: Plan, *, gap: float = 0.001, seconds_max: float = 60.0) -> JointProof:
    """Return a lower bound on the step time of every plan within a limit that swaps and recomputes.

    It is tighter than `joint_bound`: tensors are swapped and dropped as a whole, and sources have to be resident.

    Parameters
    ----------
    plan : Plan
        A plan within its own limit.
    gap : float, default 0.001
        Relative difference between plan and bound at which the refinement stops.
    seconds_max : float, default 60.0
        Time limit, in seconds; at the limit the best bound so far is returned.

    Returns
    -------
    JointProof
        The bound, and the fastest plan that was found meanwhile.

    Raises
    ------
    InfeasibleLimitError
        If no plan stays within the limit.
    ValueError
        If the plan exceeds its limit.

    Notes
    -----
    This is a branch and bound over what a plan does with each tensor: keep, swap or drop it. `Choices.least_seconds`
    bounds all plans with the same choices for the first tensors. The choices with the least bound are extended by the
    next tensor, until none are left whose bound is below the incumbent. If all tensors are decided, `exact_placement`
    finds the fastest plan with these choices. At any time every plan that is faster than the incumbent has the choices
    of one row that is left. So the least of the rows' bounds is a valid bound.
    """
    trace, link, limit_bytes = plan.trace, plan.link, plan.limit_bytes
    check_limit(trace, limit_bytes)
    if plan.peak_bytes > limit_bytes:
        raise ValueError(
            f"the given plan needs {plan.peak_bytes} bytes, the limit is {limit_bytes}; give a plan within the limit"
        )
    end = time.monotonic() + seconds_max
    bound = min(plan.step_seconds, max(plan.compute_seconds, joint_bound(trace, limit_bytes, link)))
    choices = Choices(trace, link, limit_bytes)
    rows = [(bound, 0, b"")]  # a heap: the bound, minus the number of choices so that more come first, the choices
    deepest = -1
    while plan.step_seconds > bound * (1 + gap) and time.monotonic() < end:
        _, _, chosen = heapq.heappop(rows)
        if len(chosen) == len(choices.order):
            exact = _exactly_placed(plan, choices, chosen)
            if exact is None:
                break
            plan = exact
        else:
            if len(chosen) > deepest:
                deepest = len(chosen)
                placed = _placed(plan, choices.ids(chosen, DROPPED)) or plan
                plan = min(plan, placed, key=lambda each: each.step_seconds)
            for choice in choices.options(choices.order[len(chosen)]):
                more = chosen + bytes([choice])
                seconds = max(bound, choices.least_seconds(more))
                if seconds < plan.step_seconds:
                    heapq.heappush(rows, (seconds, -len(more), more))
        bound = rows[0][0] if rows else plan.step_seconds
    return JointProof(plan, min(bound, plan.step_seconds))


def _exactly_placed(plan: Plan, choices: Choices, chosen: bytes) -> Plan | None:
    """Return the faster one of the plan and the fastest with these choices; None if that one was not found."""
    dropped, swapped = choices.ids(chosen, DROPPED), choices.ids(chosen, SWAPPED)
    step = Step(recomputed(plan.trace, dropped), plan.link)
    indices = [i for i, tensor_id in enumerate(step.ids) if tensor_id in swapped]
    exact = exact_placement(step, indices, plan.limit_bytes, plan.step_seconds)
    if not exact.complete:
        return None
    if exact.swaps is None:
        return plan
    return make_plan(plan.trace, plan.link, exact.swaps, plan.limit_bytes, recomputes=dropped)


def _placed(plan: Plan, dropped: Collection[int]) -> Plan | None:
    """Return the fastest plan found that drops these tensors; None if none is found within the limit."""
    trace, link, limit_bytes = plan.trace, plan.link, plan.limit_bytes
    step = Step(recomputed(trace, dropped), link)
    found = [step.place(minimal_set(step, each, limit_bytes), limit_bytes) for each in rankings(step)[:_RANKINGS]]
    placed = [placement for placement in found if placement is not None]
    if not placed:
        return None
    best = min(placed, key=lambda placement: placement.step_seconds)
    return make_plan(trace, link, step.swaps(best), limit_bytes, recomputes=dropped)
