"""The swaps of a reference step: no copy runs during a node, so its nodes take as long as without swapping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.plan.result import Plan
from offload.plan.simulate import Swap, resident_bytes
from offload.plan.trace import SavedTensor

__all__ = ["serial_swaps"]


def serial_swaps(plan: Plan) -> tuple[Swap, ...]:
    """Return swaps of the tensors that a plan swaps or recomputes, in as few groups as its peak allows.

    A node after a copy takes longer: the copy has evicted data from the caches, and threads that waited have to wake
    up. So tensors stay until the plan's peak would be exceeded. Then all of them are copied out together. In backward,
    as many tensors as there is room for are copied in together. A tensor that can stay until backward uses it is not
    swapped.

    Parameters
    ----------
    plan : Plan
        The result stays within its peak, unless the step exceeds it even if these tensors are swapped for as long as is
        allowed.

    Returns
    -------
    tuple of Swap
        Sorted by release. Tensors with the same release form a group, which is copied out before this node starts;
        those with the same prefetch are copied in before that node starts. Nothing is computed during these copies.
    """
    trace = plan.trace
    ids = {swap.id for swap in plan.swaps} | {row.id for row in plan.recomputes}
    moved = [tensor for tensor in trace.tensors if tensor.id in ids]
    at_once = [Swap(tensor.id, tensor.last_forward + 1, tensor.first_backward) for tensor in moved]
    room = plan.peak_bytes - np.array(resident_bytes(trace, at_once), dtype=np.int64)
    releases = _releases(len(trace.nodes), moved, room)
    for tensor in moved:
        room[tensor.last_forward + 1 : releases.get(tensor.id, tensor.first_backward)] -= tensor.bytes
    swaps: list[Swap] = []
    prefetch = -1
    for tensor in sorted(moved, key=lambda each: each.first_backward):
        release = releases.get(tensor.id)
        if release is None:
            continue
        fits = tensor.bytes <= room[prefetch : tensor.first_backward].min(initial=tensor.bytes)
        if release > prefetch or not fits:
            prefetch = tensor.first_backward
        room[prefetch : tensor.first_backward] -= tensor.bytes
        swaps.append(Swap(tensor.id, release, prefetch))
    return tuple(sorted(swaps, key=lambda swap: (swap.release, swap.id)))


def _releases(node_count: int, moved: Sequence[SavedTensor], room: NDArray[np.int64]) -> dict[int, int]:
    """Return the node before which each tensor is copied out, by id; tensors that stay until their use are missing."""
    ready, used = defaultdict(list), defaultdict(list)
    for tensor in moved:
        ready[tensor.last_forward + 1].append(tensor)
        used[tensor.first_backward].append(tensor)
    releases: dict[int, int] = {}
    staying: dict[int, int] = {}
    staying_bytes = 0
    for node in range(node_count):
        for tensor in ready[node]:
            staying[tensor.id] = tensor.bytes
            staying_bytes += tensor.bytes
        for tensor in used[node]:
            staying_bytes -= staying.pop(tensor.id, 0)
        if staying_bytes > room[node]:
            releases.update(dict.fromkeys(staying, node))
            staying.clear()
            staying_bytes = 0
    return releases
