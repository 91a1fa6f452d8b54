"""Chooses the nodes at which the tensors of a given set are released and prefetched.

A search such as `swap_search` chooses the set, this module chooses the nodes, and `simulate` times the resulting plan.

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

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.plan.simulate import Link, Swap, unswapped_bytes
from offload.plan.trace import Trace

__all__ = ["Stall", "Step", "SwapPlacement"]

_ARRAY_FROM = 40  # nodes from prefetch to use; if there are more on average, NumPy is faster than a Python loop

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
        self._clock = np.asarray(self.clock)
        self._bytes = np.asarray(self.bytes, dtype=np.int64)
        self._release_min = np.asarray(self.release_min, dtype=np.int64)
        self._first_backward = np.asarray(self.first_backward, dtype=np.int64)

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
        at = np.asarray(indices, dtype=np.int64)
        away = self._bytes_by_node(self._release_min[at], self._first_backward[at], self._bytes[at])
        headroom: Ints = limit_bytes - self.unswapped_bytes + away
        return headroom

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
            The tensors to swap. Those that save no memory are left out of the result.
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
        indices = sorted(indices)
        while True:
            headroom = self.headroom(indices, limit_bytes)
            if headroom.size and int(headroom.min()) < 0:
                return None
            release, ready = self._choose_releases(indices, headroom.tolist())
            useless = {i for i in indices if release[i] >= self.first_backward[i]}
            if not useless:
                if ready.size and ready[-1] + self.seconds[-1] + self._overhead(indices) > cutoff_seconds:
                    return None
                prefetch = self._choose_prefetches(indices, headroom, release, ready, safety_factor, not_before)
                useless = {i for i in indices if release[i] >= prefetch[i]}
            if not useless:
                return self._timed(indices, release, prefetch, not_before)
            indices = [i for i in indices if i not in useless]

    def releases(self, indices: Iterable[int], limit_bytes: int) -> dict[int, int]:
        """Return the releases of all given tensors as the first pass of `place` chooses them.

        Unlike `place`, this keeps tensors whose release is at `first_backward` or later.
        """
        indices = sorted(indices)
        return self._choose_releases(indices, self.headroom(indices, limit_bytes).tolist())[0]

    def _bytes_by_node(self, first: Ints, stop: Ints, count: Ints) -> Ints:
        """Return per node the sum of `count` over the ranges [first, stop) that contain the node."""
        change = np.bincount(first, weights=count, minlength=self.node_count + 1)
        change -= np.bincount(stop, weights=count, minlength=self.node_count + 1)
        return np.cumsum(change[: self.node_count]).astype(np.int64)

    def _choose_releases(
        self, indices: Sequence[int], headroom: list[int]
    ) -> tuple[dict[int, int], NDArray[np.float64]]:
        """Return the release of each tensor, and the time at which each node can start if no copy-in is late."""
        size, out_seconds = self.bytes, self.out_seconds
        packs = [*(self.packed[i] for i in indices), -1]
        by_release_min = sorted(indices, key=self.release_min.__getitem__)
        release_mins = [*(self.release_min[i] for i in by_release_min), -1]
        out_end: dict[int, float] = {}
        release: dict[int, int] = {}
        pending: list[int] = []  # a heap in copy-out order: no longer needed by forward, not yet released
        remaining, pending_bytes, next_pack, next_pending = len(indices), 0, 0, 0
        k = packs[0] if indices else self.node_count
        ready = self.clock[:k]
        now, channel_free = self.clock[k], 0.0
        while remaining and k < self.node_count:
            while release_mins[next_pending] == k:
                heapq.heappush(pending, by_release_min[next_pending])
                pending_bytes += size[by_release_min[next_pending]]
                next_pending += 1
            while pending:
                end = out_end[pending[0]]
                if end > now:
                    if pending_bytes <= headroom[k]:
                        break
                    now = end
                i = heapq.heappop(pending)
                release[i] = k
                pending_bytes -= size[i]
                remaining -= 1
            ready.append(now)
            now += self.seconds[k]
            while packs[next_pack] == k:
                i = indices[next_pack]
                channel_free = out_end[i] = (now if now > channel_free else channel_free) + out_seconds[i]
                next_pack += 1
            k += 1
        release.update(dict.fromkeys(pending, self.node_count))
        return release, np.concatenate((ready, self._clock[k:-1] + (now - self.clock[k])))

    def _choose_prefetches(
        self,
        indices: Sequence[int],
        headroom: Ints,
        release: dict[int, int],
        ready: NDArray[np.float64],
        safety_factor: float,
        not_before: Mapping[int, int],
    ) -> dict[int, int]:
        """Return the prefetch node of each tensor, in the order of `first_backward`. `indices`: in copy-out order."""
        at = np.asarray(indices, dtype=np.int64)
        released = np.asarray([release[i] for i in indices], dtype=np.int64)
        free = headroom - self._bytes_by_node(self._release_min[at], released, self._bytes[at])
        order = sorted(indices, key=self.copy_in_rank.__getitem__)
        uses = self._first_backward[order]
        # For each copy-in, the latest start that causes no stall; the last copy-in comes first.
        begin, begins = np.inf, []
        for i, needed in zip(reversed(order), reversed(ready[uses].tolist()), strict=True):
            begin = (needed if needed < begin else begin) - self.in_seconds[i] * safety_factor
            begins.append(begin)
        latest = np.searchsorted(ready, begins[::-1], side="right") - 1
        earliest = [max(release[i], not_before.get(i, 0)) for i in order]
        first = np.minimum(np.maximum(latest, np.asarray(earliest, dtype=np.int64)), uses)
        reserve = _reserve_by_array if order and float((uses - first).mean()) > _ARRAY_FROM else _reserve_by_loop
        nodes = reserve(free, first.tolist(), uses.tolist(), self._bytes[order].tolist())
        return dict(zip(order, nodes, strict=True))

    def _timed(
        self, indices: Sequence[int], release: dict[int, int], prefetch: dict[int, int], not_before: Mapping[int, int]
    ) -> SwapPlacement:
        """Return the placement with its step time, computed as in `simulate` but only at nodes with copies."""
        by_use = sorted(indices, key=self.copy_in_rank.__getitem__)
        by_release, by_prefetch = sorted(indices, key=release.__getitem__), sorted(by_use, key=prefetch.__getitem__)
        packs, uses = [*(self.packed[i] for i in indices), -1], [*(self.first_backward[i] for i in by_use), -1]
        releases, prefetches = [*(release[i] for i in by_release), -1], [*(prefetch[i] for i in by_prefetch), -1]
        next_pack = next_use = next_release = next_prefetch = 0
        out_end: dict[int, float] = {}
        in_end: dict[int, float] = {}
        out_free = in_free = stalled = 0.0
        stalls = []
        for k in sorted({*packs, *releases, *uses, *prefetches} - {-1}):
            now = begin = self.clock[k] + stalled
            while releases[next_release] == k:
                i = by_release[next_release]
                next_release += 1
                if out_end[i] > now:
                    stalls.append(Stall(out_end[i] - now, k, i, True))
                    now = out_end[i]
            while prefetches[next_prefetch] == k:
                i = by_prefetch[next_prefetch]
                next_prefetch += 1
                in_free = in_end[i] = (now if now > in_free else in_free) + self.in_seconds[i]
            while uses[next_use] == k:
                i = by_use[next_use]
                next_use += 1
                if in_end[i] > now:
                    stalls.append(Stall(in_end[i] - now, k, i, False))
                    now = in_end[i]
            stalled += now - begin
            now += self.seconds[k]
            while packs[next_pack] == k:
                i = indices[next_pack]
                next_pack += 1
                out_free = out_end[i] = (now if now > out_free else out_free) + self.out_seconds[i]
        return SwapPlacement(
            self.clock[-1] + stalled + self._overhead(indices),
            tuple(indices),
            tuple(release[i] for i in indices),
            tuple(prefetch[i] for i in indices),
            tuple(stalls),
            not_before,
        )

    def _overhead(self, indices: Sequence[int]) -> float:
        return sum(map(self.overhead_seconds.__getitem__, indices))


def _reserve_by_loop(free: Ints, first: list[int], use: list[int], count: list[int]) -> list[int]:
    """For each tensor in turn, reserve memory at consecutive nodes, backwards from the node before its use.

    This ends at a node without room, or when `first` is reached. Returns the earliest reserved node of
    each tensor, or the node of its use if none was reserved.
    """
    free_bytes, nodes = free.tolist(), []
    for low, k, needed in zip(first, use, count, strict=True):
        while k > low and free_bytes[k - 1] >= needed:
            k -= 1
            free_bytes[k] -= needed
        nodes.append(k)
    return nodes


def _reserve_by_array(free: Ints, first: list[int], use: list[int], count: list[int]) -> list[int]:
    """The same as `_reserve_by_loop`; faster for long ranges."""
    nodes = []
    for low, high, needed in zip(first, use, count, strict=True):
        (full,) = (free[low:high] < needed).nonzero()
        k = low + int(full[-1]) + 1 if full.size else low
        free[k:high] -= needed
        nodes.append(k)
    return nodes
