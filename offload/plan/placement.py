"""Chooses the nodes at which the tensors of a given set are released and prefetched.

A search such as `swap_search` chooses the set, this module chooses the nodes, and `simulate` times the resulting plan.
A search tries thousands of sets, so the choice is computed natively (`csrc/placement.cpp`).

A tensor's index is its position among the tensors of a `Step` (all tensors of the trace, or those that `with_changes`
keeps), sorted by the node that saves them (`packed`), then by id. Those that are swapped are copied out in this order.

Given the set, few choices remain:

* Releases. The copy-out queue is FIFO. A tensor is released at the first node that starts after its last use in
  forward and after its copy-out has ended. If a node needs the memory earlier, tensors that forward no longer
  uses are released there, in copy-out order, until the node fits, and compute waits for their copy-outs.
* Prefetches. They are chosen as if copy-ins ran in the order of `first_backward`, the node in which backward first
  uses the tensor. A copy-in is queued as late as possible: at the last node from which this copy-in and all later
  ones still end in time. From its prefetch node to the node before `first_backward`, the tensor takes memory that
  it would not take without the prefetch. If one of these nodes has no room, the prefetch moves to the node after
  the last one without room. A tensor that backward uses later may then be copied in before this one.
* A tensor whose prefetch would be at or before its release saves no memory and stays resident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.plan.simulate import Link, Swap, unswapped_bytes
from offload.plan.trace import Trace

__all__ = ["Stall", "Step", "SwapPlacement"]

_LIMIT_MAX = 1 << 62  # a larger limit is as good as none, and sums with it exceed 64 bits

Ints = NDArray[np.int64]
_NO_NODES: Mapping[int, int] = {}
_BY_TENSOR = (
    *("ids", "bytes", "packed", "release_min", "first_backward"),
    *("out_seconds", "in_seconds", "overhead_seconds"),
)


class Stall(NamedTuple):
    """At `node`, compute waits `seconds` for the copy-out or the copy-in of a tensor, given by its index."""

    seconds: float
    node: int
    tensor: int
    is_out: bool


@dataclass(frozen=True, slots=True)
class SwapPlacement:
    """A set of tensors with their releases and prefetches, and the step time that results.

    Parameters
    ----------
    step_seconds : float
        Step time, including the overhead of the swaps. Equal to that of `simulate` plus the overhead, up to rounding.
    indices, releases, prefetches : tuple of int
        The swapped tensors in copy-out order, and the release node and the prefetch node of each.
    stalls : tuple of Stall
        The waits of compute, in node order.
    not_before : mapping of int to int
        Lower bounds on the prefetch node, by tensor index. Other tensors have none.
    """

    step_seconds: float
    indices: tuple[int, ...]
    releases: tuple[int, ...]
    prefetches: tuple[int, ...]
    stalls: tuple[Stall, ...]
    not_before: Mapping[int, int] = field(default_factory=dict)


class Step:
    """One training step, prepared for fast placement: a trace and a link as lists by tensor index or by node.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths, latency and overheads.
    """

    def __init__(self, trace: Trace, link: Link) -> None:
        tensors = sorted(trace.tensors, key=lambda x: (x.packed, x.id))
        self.link = link
        self.ids = [x.id for x in tensors]
        self.bytes = [x.bytes for x in tensors]
        self.packed = [x.packed for x in tensors]
        self.release_min = [x.last_forward + 1 for x in tensors]  # first node at which a release is allowed
        self.first_backward = [x.first_backward for x in tensors]
        self.out_seconds = [link.latency + x.copied_bytes / link.out_bandwidth for x in tensors]
        self.in_seconds = [link.latency + x.copied_bytes / link.in_bandwidth for x in tensors]
        self.overhead_seconds = [link.overhead_seconds(x.copied_bytes) for x in tensors]
        self.seconds = [node.seconds for node in trace.nodes]
        self.unswapped_bytes = np.asarray(unswapped_bytes(trace), dtype=np.int64)
        self._prepare()

    def _prepare(self) -> None:
        self.node_count, self.count = len(self.seconds), len(self.ids)
        # Without stalls: each node's start, then the step's end.
        self.clock = list(accumulate(self.seconds, initial=0.0))
        self.copy_in_order = [i for *_, i in sorted(zip(self.first_backward, self.ids, range(self.count), strict=True))]
        self.copy_in_rank = [0] * self.count
        for rank, i in enumerate(self.copy_in_order):
            self.copy_in_rank[i] = rank
        from offload import _core  # here: traces and plans can be read even if the extension is not built

        self._placer = _core.Placer(
            self.bytes,
            self.packed,
            self.release_min,
            self.first_backward,
            self.out_seconds,
            self.in_seconds,
            self.overhead_seconds,
            self.copy_in_rank,
            self.seconds,
            self.unswapped_bytes,
        )

    def with_changes(
        self, kept: Sequence[int], seconds: list[float], more_bytes: Sequence[int], first_uses: Mapping[int, int]
    ) -> Step:
        """Return the step without the tensors that are recomputed.

        Parameters
        ----------
        kept : sequence of int
            Indices of the tensors that remain, in copy-out order.
        seconds : list of float
            The time of each node.
        more_bytes : sequence of int
            Per node, the number of bytes to add to `unswapped_bytes`: the workspaces of recomputation, plus the inputs
            that are kept longer for it, minus the recomputed tensors that are not in memory at this node.
        first_uses : mapping of int to int
            The new `first_backward` of each tensor whose first use in backward changes. The keys are indices in
            `self`, not in the returned step.
        """
        step = Step.__new__(Step)
        step.link, step.seconds = self.link, seconds
        for name in _BY_TENSOR:
            values = getattr(self, name)
            setattr(step, name, [values[i] for i in kept])
        if first_uses:
            step.first_backward = [first_uses.get(i, self.first_backward[i]) for i in kept]
        step.unswapped_bytes = self.unswapped_bytes + np.asarray(more_bytes, dtype=np.int64)
        step._prepare()
        return step

    @property
    def compute_seconds(self) -> float:
        """Step time without swaps, in seconds."""
        return self.clock[-1]

    def swaps(self, placement: SwapPlacement) -> tuple[Swap, ...]:
        """Return the swaps of a placement, sorted by id."""
        rows = zip(placement.indices, placement.releases, placement.prefetches, strict=True)
        return tuple(sorted(Swap(self.ids[i], release, prefetch) for i, release, prefetch in rows))

    def headroom(self, indices: Sequence[int], limit_bytes: int) -> Ints:
        """Return per node the limit minus the resident bytes, if each tensor is swapped out for as long as is allowed.

        Negative at nodes where swapping this set is not enough to stay within the limit.
        """
        return self._placer.headroom(indices, min(limit_bytes, _LIMIT_MAX))

    def place(
        self,
        indices: Iterable[int],
        limit_bytes: int,
        cutoff_seconds: float = np.inf,
        *,
        safety_factor: float = 1.0,
        not_before: Mapping[int, int] = _NO_NODES,
    ) -> SwapPlacement | None:
        """Choose the releases and prefetches of a set of tensors.

        Parameters
        ----------
        indices : iterable of int
            The tensors to swap. One that saves no memory is left out, and the nodes of the others are chosen again.
        limit_bytes : int
            Limit on the resident bytes.
        cutoff_seconds : float, default infinite
            No placement is returned if the step would take longer than this even without waits for copy-ins. A returned
            placement may still take longer.
        safety_factor : float, default 1.0
            Copy-ins are assumed to take this many times as long, so that they are prefetched earlier.
        not_before : mapping of int to int
            Lower bounds on the prefetch node, by tensor index. Other tensors have none.

        Returns
        -------
        SwapPlacement or None
            None if the set cannot stay within the limit, or if the step takes longer than `cutoff_seconds` even without
            waits for copy-ins.
        """
        limit_bytes = min(limit_bytes, _LIMIT_MAX)
        found = self._placer.place(list(indices), limit_bytes, cutoff_seconds, safety_factor, not_before)
        if found is None:
            return None
        seconds, chosen, releases, prefetches, stalls = found
        return SwapPlacement(seconds, chosen, releases, prefetches, tuple(map(Stall._make, stalls)), not_before)

    def releases(self, indices: Iterable[int], limit_bytes: int) -> dict[int, int]:
        """Return the releases of all given tensors as `place` chooses them before it leaves out any tensor."""
        indices = sorted(indices)
        return dict(zip(indices, self._placer.releases(indices, min(limit_bytes, _LIMIT_MAX)), strict=True))
