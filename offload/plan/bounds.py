"""Lower bounds that hold for every swap-only plan: the cut bound on the step time, and the least feasible limit.

The bound is reported with every plan. It depends on the trace and the link, not on the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from offload.plan.cover_trees import CopyQueue
from offload.plan.simulate import Link, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace
from offload.units import format_bytes, round_up_bytes

__all__ = [
    "CutBounds",
    "InfeasibleLimitError",
    "Reason",
    "check_limit",
    "cut_bound",
    "cut_bounds",
    "least_feasible_limit",
    "with_copied_bytes",
]

NOT_SAVED = "not saved for backward"
IN_UPDATE = "in use during the optimizer's step"
_TOLERANCE = 1e-9  # relative; far above the rounding of the segment tree, far below any relevant duration


@dataclass(frozen=True, slots=True)
class Reason:
    """An item that is in the way of a limit, or an argument that frees memory: its bytes and a description.

    If the item is base bytes, `node` is the node at which they are resident.
    """

    bytes: int
    text: str
    node: int | None = None


class InfeasibleLimitError(ValueError):
    """No plan stays within the limit.

    Attributes
    ----------
    limit_bytes : int
        The requested limit, in bytes.
    least_limit_bytes : int
        The least feasible limit, in bytes.
    reasons : tuple of Reason
        The largest items that stay resident under every plan at the node that needs `least_limit_bytes`; at most three.
    knobs : tuple of Reason
        Arguments of `offload.enable` that would free more, with the bytes that they free at most; largest first.
    lacks_optimizer : bool
        Whether no optimizer had updated the model yet: `least_limit_bytes` lacks its state.
    """

    def __init__(
        self,
        limit_bytes: int,
        least_limit_bytes: int,
        reasons: tuple[Reason, ...],
        knobs: tuple[Reason, ...] = (),
        lacks_optimizer: bool = False,
    ) -> None:
        self.limit_bytes, self.least_limit_bytes, self.reasons = limit_bytes, least_limit_bytes, reasons
        self.knobs, self.lacks_optimizer = knobs, lacks_optimizer
        listed = "; ".join(f"{format_bytes(reason.bytes)} {reason.text}" for reason in reasons)
        more = "; ".join(f"{knob.text}: up to {format_bytes(knob.bytes)}" for knob in knobs)
        later = " (and more for optimizer state: no optimizer has stepped yet)" if lacks_optimizer else ""
        super().__init__(
            f"memory_limit: no plan keeps {format_bytes(limit_bytes)}; the least that works for this step is "
            f"{format_bytes(least_limit_bytes)}{later}. "
            f'Write memory_limit="{round_up_bytes(least_limit_bytes)}" or more, or '
            f"make the batch smaller. In the way: {listed}" + (f". What frees more: {more}" if more else "")
        )

    @property
    def least_bytes(self) -> int:
        """The same as `least_limit_bytes`."""
        return self.least_limit_bytes

    def __reduce__(self) -> tuple[type[InfeasibleLimitError], tuple[Any, ...]]:
        return type(self), (
            self.limit_bytes, self.least_limit_bytes, self.reasons, self.knobs, self.lacks_optimizer,
        )  # fmt: skip


def least_feasible_limit(trace: Trace) -> int:
    """Return the least limit within which some swap-only plan runs the step, in bytes.

    Parameters
    ----------
    trace : Trace
        The step.

    Returns
    -------
    int
        The peak in bytes if every tensor is released right after `last_forward` and prefetched at `first_backward`. No
        plan has fewer bytes resident during any node.
    """
    return max(unavoidable_bytes(trace), default=0)


def check_limit(trace: Trace, limit_bytes: int) -> None:
    """Raise unless some swap-only plan stays within `limit_bytes`.

    Parameters
    ----------
    trace : Trace
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes.

    Raises
    ------
    InfeasibleLimitError
        If no plan stays within the limit. The error has the least feasible limit and the three largest reasons.
    """
    error = refusal(trace, limit_bytes)
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback refers to this frame, and so to all callers: the cycle would keep the step's tensors


def refusal(trace: Trace, limit_bytes: int) -> InfeasibleLimitError | None:
    """Return the error that `check_limit` raises; None where a plan stays within the limit."""
    unavoidable = unavoidable_bytes(trace)
    least_bytes = max(unavoidable, default=0)
    if least_bytes <= limit_bytes:
        return None
    k = unavoidable.index(least_bytes)
    name = trace.nodes[k].name
    reasons = [Reason(trace.base_bytes[k], f"{NOT_SAVED}, while node {k} ({name}) runs", k)]
    for tensor in trace.tensors:
        if tensor.produced <= k <= tensor.last_forward or tensor.first_backward <= k <= tensor.last_use:
            text = f"tensor {tensor.id} of {trace.nodes[tensor.produced].name}, in use at node {k} ({name})"
            reasons.append(Reason(tensor.bytes, text))
    reasons.sort(key=lambda reason: -reason.bytes)
    return InfeasibleLimitError(limit_bytes, least_bytes, tuple(reasons[:3]))


@dataclass(frozen=True, slots=True)
class CutBounds:
    """Two lower bounds on the step time of every swap-only plan within a limit, in seconds.

    Attributes
    ----------
    single : float
        Maximum over the nodes where the unswapped step exceeds the limit.
    double : float
        Maximum over pairs of such nodes; at least `single`, up to rounding.
    """

    single: float
    double: float


def cut_bound(trace: Trace, limit_bytes: int, link: Link) -> float:
    """Return a lower bound on the step time of every swap-only plan within a limit.

    Parameters
    ----------
    trace : Trace
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    link : Link
        Bandwidths. The bound does not use the latency.

    Returns
    -------
    float
        Seconds; infinite if the limit is below the least feasible one.

    Notes
    -----
    Let the unswapped step exceed the limit by E bytes at node k. These bytes must be copied out before k, after the
    tensors that hold them are packed, and copied in after k, before these tensors are used. The copy-outs give a lower
    bound on the start of k, the copy-ins one on the rest of the step. The bound is the maximum of their sum over k.

    Examples
    --------
    >>> from offload.plan.trace import Node, SavedTensor, Trace
    >>> nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    >>> trace = Trace(nodes, (0, 0, 6, 0), (SavedTensor(7, 10, 0, 0, 0, 3, 3),))
    >>> cut_bound(trace, 10, Link(2.0, 2.0))
    9.0
    """
    return cut_bounds(trace, limit_bytes, link).single


def cut_bounds(trace: Trace, limit_bytes: int, link: Link) -> CutBounds:
    """Return the bound of `cut_bound` and a tighter one from two nodes at once.

    Parameters
    ----------
    trace : Trace
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    link : Link
        Bandwidths. The bound does not use the latency.

    Returns
    -------
    CutBounds
        Infinite if the limit is below the least feasible one.

    Notes
    -----
    Take two nodes j <= k. The copy-outs before j delay the start of j, the copy-ins after k delay the end of the step,
    and the nodes from j to k still have to run. So the double bound adds a wait early in forward to one late in
    backward.

    A segment tree over the tensors in queue order gives the bounds of all nodes up to rounding, in
    O((nodes + tensors) log tensors). The nodes close to the maximum are then evaluated exactly as `cut_bound` is
    defined, so that the single bound does not depend on the tree's rounding.
    """
    trace = with_copied_bytes(trace)
    clock = list(accumulate((node.seconds for node in trace.nodes), initial=0.0))
    total = clock[-1]
    excess = [max(0, count - limit_bytes) for count in unswapped_bytes(trace)]
    if not any(excess):
        return CutBounds(max((at + (total - at) for at in clock), default=total), total)
    by_pack = sorted(trace.tensors, key=lambda x: x.packed)
    by_use = sorted(trace.tensors, key=lambda x: -x.first_backward)
    start_min = _copy_bounds(excess, by_pack, [clock[x.packed + 1] for x in by_pack], link.out_bandwidth)
    rest_min = _copy_bounds(excess, by_use, [total - clock[x.first_backward] for x in by_use], link.in_bandwidth)
    if math.inf in start_min:
        return CutBounds(math.inf, math.inf)
    margin = _TOLERANCE * max(total, 1e-300)
    single, near, start_delay, double = total, [], 0.0, total
    for k, node in enumerate(trace.nodes):
        late_start, late_rest = start_min[k] - clock[k], node.seconds + rest_min[k] - (total - clock[k])
        if not excess[k] or max(late_start, late_rest) < -margin:
            single = max(single, clock[k] + (total - clock[k]))
        else:
            near.append((max(0.0, late_start) + max(0.0, late_rest), k))
            start_delay = max(start_delay, late_start)
            double = max(double, total + start_delay + max(0.0, late_rest))
    near.sort(reverse=True)
    for value, k in near:
        if value < near[0][0] - margin:
            break
        single = max(single, _cut(k, trace.nodes[k].seconds, excess[k], by_pack, by_use, clock, link))
    return CutBounds(single, double)


def with_copied_bytes(trace: Trace) -> Trace:
    """Return the step with each tensor's size reduced to the bytes of its copies. No plan is slower in this step.

    The rest of a tensor's bytes counts as base bytes while the tensor is in use, and takes no memory in between.
    """
    if all(tensor.copy_bytes is None for tensor in trace.tensors):
        return trace
    change = [0] * (len(trace.nodes) + 1)
    for tensor in trace.tensors:
        rest = tensor.bytes - tensor.copied_bytes
        change[tensor.produced] += rest
        change[tensor.last_forward + 1] -= rest
        change[tensor.first_backward] += rest
        change[tensor.last_use + 1] -= rest
    base = tuple(map(int.__add__, trace.base_bytes, accumulate(change)))
    tensors = (replace(tensor, bytes=tensor.copied_bytes, copy_bytes=None) for tensor in trace.tensors)
    return replace(trace, base_bytes=base, tensors=tuple(tensors))


def unavoidable_bytes(trace: Trace) -> list[int]:
    """Return the bytes resident during each node if every tensor is swapped out for as long as is allowed."""
    change = np.zeros(len(trace.nodes) + 1, dtype=np.int64)
    for tensor in trace.tensors:
        change[tensor.produced] += tensor.bytes
        change[tensor.last_forward + 1] -= tensor.bytes
        change[tensor.first_backward] += tensor.bytes
        change[tensor.last_use + 1] -= tensor.bytes
    resident = np.cumsum(change[:-1]) + np.asarray(trace.base_bytes, dtype=np.int64)
    unavoidable: list[int] = resident.tolist()
    return unavoidable


def _cut(
    k: int,
    seconds: float,
    excess: int,
    by_pack: Sequence[SavedTensor],
    by_use: Sequence[SavedTensor],
    clock: Sequence[float],
    link: Link,
) -> float:
    """Return the bound of one node, evaluated directly as it is defined."""
    total = clock[-1]
    start, rest, before = clock[k], total - clock[k], 0
    for tensor in by_pack:
        if before >= excess:
            break
        if tensor.last_forward < k < tensor.first_backward:
            start = max(start, clock[tensor.packed + 1] + (excess - before) / link.out_bandwidth)
            before += tensor.bytes
    before = 0
    for tensor in by_use:
        if before >= excess:
            break
        if tensor.last_forward < k < tensor.first_backward:
            copies = seconds + (excess - before) / link.in_bandwidth + total - clock[tensor.first_backward]
            rest = max(rest, copies)
            before += tensor.bytes
    return start + rest


def _copy_bounds(
    excess: Sequence[int], order: Sequence[SavedTensor], offsets: Sequence[float], bandwidth: float
) -> list[float]:
    """Return for each node the earliest time at which its excess bytes have been copied; 0.0 without excess.

    `CopyQueue` finds it, from the tensors that can be swapped out at the node. For copy-ins, time runs backwards from
    the end of the step.
    """
    queue = CopyQueue(order, offsets, bandwidth, len(excess))
    result = []
    for k, needed in enumerate(excess):
        queue.move_to(k)
        result.append(queue.bound(needed) if needed else 0.0)
    return result
