"""Changes a plan whose tensors were late when it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offload.plan.result import Plan, make_plan
from offload.plan.simulate import Swap, resident_bytes
from offload.plan.trace import Trace

__all__ = ["with_earlier_prefetches"]


def with_earlier_prefetches(plan: Plan, late: Mapping[int, float], limit_bytes: int) -> Plan:
    """Return the plan with each late tensor's prefetch moved earlier by the seconds it was late, within the limit."""
    starts = plan.timing.start
    swaps = {swap.id: swap for swap in plan.swaps}
    for tensor_id, seconds in sorted(late.items(), key=lambda item: -item[1]):
        swap = swaps.get(tensor_id)
        if swap is None:
            continue
        prefetch = swap.prefetch
        while prefetch - 1 > swap.release and starts[swap.prefetch] - starts[prefetch] < seconds:
            earlier = Swap(swap.id, swap.release, prefetch - 1)
            if _peak(plan.recomputed_trace, [*(s for s in swaps.values() if s.id != swap.id), earlier]) > limit_bytes:
                break
            prefetch -= 1
        swaps[tensor_id] = Swap(swap.id, swap.release, prefetch)
    recomputes = None if plan.swap_only else [row.id for row in plan.recomputes]
    made = make_plan(plan.trace, plan.link, tuple(swaps.values()), plan.limit_bytes, recomputes=recomputes)
    return replace(made, state=plan.state)


def _peak(trace: Trace, swaps: Sequence[Swap]) -> int:
    return max(resident_bytes(trace, swaps), default=0)
