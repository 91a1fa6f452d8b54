"""Adjusts a plan after measured steps have waited for some of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.plan.result import Plan, make_plan
from offload.plan.simulate import Swap, resident_bytes

__all__ = ["with_earlier_prefetches"]


def with_earlier_prefetches(plan: Plan, late: Mapping[int, float], limit_bytes: int) -> Plan:
    """Return the plan with the prefetches of late tensors moved earlier.

    Parameters
    ----------
    plan : Plan
        The plan.
    late : mapping of int to float
        How many seconds steps have waited for a tensor, by its id. Its prefetch moves by at least as much, or as far as
        the limit allows.
    limit_bytes : int
        No prefetch moves to a node in which more than this would be resident.
    """
    starts = plan.timing.start
    swaps = {swap.id: swap for swap in plan.swaps}
    nbytes = {tensor.id: tensor.bytes for tensor in plan.recomputed_trace.tensors}
    resident = [*resident_bytes(plan.recomputed_trace, plan.swaps)]
    for tensor_id, seconds in sorted(late.items(), key=lambda item: -item[1]):
        swap = swaps.get(tensor_id)
        if swap is None:
            continue
        prefetch = swap.prefetch
        while prefetch - 1 > swap.release and starts[swap.prefetch] - starts[prefetch] < seconds:
            if resident[prefetch - 1] + nbytes[tensor_id] > limit_bytes:
                break
            prefetch -= 1
            resident[prefetch] += nbytes[tensor_id]
        swaps[tensor_id] = Swap(swap.id, swap.release, prefetch)
    recomputes = None if plan.swap_only else [row.id for row in plan.recomputes]
    made = make_plan(plan.trace, plan.link, tuple(swaps.values()), plan.limit_bytes, recomputes=recomputes)
    return replace(made, state=plan.state)
