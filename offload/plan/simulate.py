"""The predicted timing of a plan: when each node and each copy runs, and the resident bytes.

The search compares plans by this timing, and `runtime/executor.py` executes plans by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.plan.trace import Link, SavedTensor, Trace

__all__ = ["Copy", "Link", "Swap", "Timing", "resident_bytes", "simulate", "unswapped_bytes"]


class Swap(NamedTuple):
    """One tensor to swap out and back in.

    Parameters
    ----------
    id : int
        Id of the tensor in the trace.
    release : int
        First node during which its device memory is free. The node waits for the copy-out.
    prefetch : int
        Node before which its device memory is allocated again and its copy-in queued.
    """

    id: int
    release: int
    prefetch: int


class Copy(NamedTuple):
    """One copy on a channel: the tensor's id, and when it starts and ends, in seconds."""

    id: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of a plan; times in seconds from the start of the step.

    Parameters
    ----------
    ready, start, finish : tuple of float
        Times of each node. `ready`: the previous node and the copy-outs for which this node waits have ended. `start`:
        its copy-ins have ended too, and it starts. `finish`: it ends.
    copy_outs, copy_ins : tuple of Copy
        In queue order.
    resident : tuple of int
        For each node: bytes resident while it runs.
    """

    ready: tuple[float, ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]
    copy_outs: tuple[Copy, ...]
    copy_ins: tuple[Copy, ...]
    resident: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        """Duration of the step, in seconds."""
        return self.finish[-1] if self.finish else 0.0

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes resident during any node."""
        return max(self.resident, default=0)


def simulate(trace: Trace, swaps: Iterable[Swap], link: Link) -> Timing:
    """Return the timing of a plan.

    Parameters
    ----------
    trace : Trace
        The step.
    swaps : iterable of Swap
        The plan; the other tensors stay in device memory.
    link : Link
        Bandwidths and latency of the copies.

    Returns
    -------
    Timing
        Starts, ends, copies and residency.

    Raises
    ------
    ValueError
        If a swap's id is unknown or occurs twice, or its nodes are out of order.

    Notes
    -----
    For each node k in order:

    1. k is ready when node k - 1 and the copy-outs of the tensors released at k have ended.
    2. The copy-ins of the tensors prefetched at k are then queued, by (first_backward, id).
    3. k starts when the copy-ins of the tensors with first_backward k have ended.
    4. When k ends, the copy-outs of the tensors packed at k are queued, by id.

    Examples
    --------
    >>> from offload.plan.trace import Node, SavedTensor, Trace
    >>> nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    >>> trace = Trace(nodes, (0, 0, 0, 0), (SavedTensor(7, 10, 0, 0, 0, 3, 3),))
    >>> timing = simulate(trace, [Swap(7, release=1, prefetch=3)], Link(10.0, 20.0))
    >>> timing.step_seconds, timing.resident
    (5.5, (10, 0, 0, 10))
    """
    swaps = sorted(swaps)
    tensors = {tensor.id: tensor for tensor in trace.tensors}
    _check(swaps, tensors)
    node_count = len(trace.nodes)
    releases, packs, uses, prefetches = _by_node(swaps, tensors, node_count)
    ready, start, finish = [0.0] * node_count, [0.0] * node_count, [0.0] * node_count
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    copy_outs: list[Copy] = []
    copy_ins: list[Copy] = []
    now = out_free = in_free = 0.0
    for k, node in enumerate(trace.nodes):
        for i in releases[k]:
            now = max(now, out_end[i])
        ready[k] = now
        for i in prefetches[k]:
            begin = max(now, in_free, out_end[i])
            in_free = in_end[i] = begin + (link.latency + tensors[i].copied_bytes / link.in_bandwidth)
            copy_ins.append(Copy(i, begin, in_free))
        for i in uses[k]:
            now = max(now, in_end[i])
        start[k] = now
        now = finish[k] = now + node.seconds
        for i in packs[k]:
            begin = max(now, out_free)
            out_free = out_end[i] = begin + (link.latency + tensors[i].copied_bytes / link.out_bandwidth)
            copy_outs.append(Copy(i, begin, out_free))
    return Timing(
        tuple(ready), tuple(start), tuple(finish), tuple(copy_outs), tuple(copy_ins), resident_bytes(trace, swaps)
    )


def _by_node(
    swaps: Sequence[Swap], tensors: dict[int, SavedTensor], node_count: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[list[int]]]:
    """Return for each node the ids released, packed, first used by backward and prefetched there, in queue order."""
    releases: list[list[int]] = [[] for _ in range(node_count)]
    packs: list[list[int]] = [[] for _ in range(node_count)]
    uses: list[list[int]] = [[] for _ in range(node_count)]
    prefetches: list[list[int]] = [[] for _ in range(node_count)]
    for swap in swaps:  # sorted by id, and the sort below is stable, so ties are broken by id
        releases[swap.release].append(swap.id)
        packs[tensors[swap.id].packed].append(swap.id)
        uses[tensors[swap.id].first_backward].append(swap.id)
    for swap in sorted(swaps, key=lambda swap: tensors[swap.id].first_backward):
        prefetches[swap.prefetch].append(swap.id)
    return releases, packs, uses, prefetches


def unswapped_bytes(trace: Trace) -> tuple[int, ...]:
    """Return the bytes resident during each node if every tensor stays in device memory."""
    return resident_bytes(trace, ())


def resident_bytes(trace: Trace, swaps: Sequence[Swap]) -> tuple[int, ...]:
    """Return the bytes resident during each node under the plan `swaps`.

    Parameters
    ----------
    trace : Trace
        The step.
    swaps : sequence of Swap
        The plan; a swapped tensor is resident in nodes produced...release - 1 and prefetch...last_use.

    Returns
    -------
    tuple of int
        One per node, ``base_bytes`` included.
    """
    change = [0] * (len(trace.nodes) + 1)
    for tensor in trace.tensors:
        change[tensor.produced] += tensor.bytes
        change[tensor.last_use + 1] -= tensor.bytes
    size = {tensor.id: tensor.bytes for tensor in trace.tensors}
    for swap in swaps:
        change[swap.release] -= size[swap.id]
        change[swap.prefetch] += size[swap.id]
    resident, total = [], 0
    for base, difference in zip(trace.base_bytes, change, strict=False):
        total += difference
        resident.append(base + total)
    return tuple(resident)


def _check(swaps: Sequence[Swap], tensors: dict[int, SavedTensor]) -> None:
    for i, swap in enumerate(swaps):
        if swap.id not in tensors:
            raise ValueError(f"swaps: no tensor has the id {swap.id}")
        if i and swaps[i - 1].id == swap.id:
            raise ValueError(f"swaps: tensor {swap.id} is swapped twice")
        tensor = tensors[swap.id]
        if not tensor.last_forward < swap.release <= swap.prefetch <= tensor.first_backward:
            raise ValueError(
                f"swaps: tensor {swap.id}: release {swap.release} and prefetch {swap.prefetch} must satisfy "
                f"last_forward {tensor.last_forward} < release <= prefetch <= first_backward {tensor.first_backward}"
            )
