"""What a plan does with each tensor, chosen for one tensor after another, with a lower bound for the tensors so far.

`joint_proof` searches these choices by branch and bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from offload.plan.bounds import unavoidable_bytes, with_copied_bytes
from offload.plan.placement import Ints
from offload.plan.recompute import first_uses
from offload.plan.simulate import Link, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace

__all__ = ["DROPPED", "KEPT", "SWAPPED", "Choices"]

KEPT, SWAPPED, DROPPED = range(3)
_SUBSETS_MAX = 10  # tensors; of more, the sums of subsets are not computed: 1,024 sums


class Choices:
    """The choices for the tensors of a step: each is kept, swapped or dropped.

    Choices are bytes, one for each of the first tensors of `order`; the tensors behind them are undecided.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Limit on the resident bytes, in bytes; at least the least feasible one.
    """

    def __init__(self, trace: Trace, link: Link, limit_bytes: int) -> None:
        self._trace = trace = with_copied_bytes(trace)
        self._link = link
        self._room: Ints = limit_bytes - np.asarray(unavoidable_bytes(trace), dtype=np.int64)
        self._seconds = [node.seconds for node in trace.nodes]
        self._fullest = int(np.argmax(unswapped_bytes(trace))) if trace.nodes else 0
        self._recipes = {x.id: x.recompute for x in trace.tensors if x.recompute is not None}
        self._made_from: dict[int, set[int]] = {x.id: set() for x in trace.tensors}
        for made, recipe in self._recipes.items():
            for source in recipe.inputs:
                self._made_from[source].add(made)
        self._last_first = {i: rank for rank, i in enumerate(TopologicalSorter(self._made_from).static_order())}
        self.order = [tensor for tensor in self._by_links() if len(self.options(tensor)) > 1]
        self._by_price = sorted((x for x in self.order if x.bytes), key=lambda x: _seconds(x) / x.bytes)

    def _by_links(self) -> list[SavedTensor]:
        """Return the tensors in the order in which they are decided: after each, those that are recomputed from it.

        So the nodes at which dropped tensors are recomputed are soon final.
        """
        tensors = {tensor.id: tensor for tensor in self._trace.tensors}
        order: dict[int, SavedTensor] = {}
        waiting = sorted(tensors.values(), key=lambda x: (-x.produced, -x.id))
        while waiting:
            tensor = waiting.pop()
            if tensor.id not in order:
                order[tensor.id] = tensor
                made = [tensors[i] for i in self._made_from[tensor.id]]
                waiting += sorted(made, key=lambda x: (x.produced, x.id))
        return list(order.values())

    def options(self, tensor: SavedTensor) -> tuple[int, ...]:
        """Return what a plan can do with a tensor. It swaps none that has no bytes or no node at which to be away."""
        swaps = (SWAPPED,) if tensor.bytes and tensor.last_forward + 1 < tensor.first_backward else ()
        return (KEPT, *swaps, *((DROPPED,) if tensor.recompute else ()))

    def ids(self, chosen: bytes, choice: int) -> set[int]:
        """Return the ids of the tensors for which this choice is made."""
        return {tensor.id for tensor, each in zip(self.order, chosen, strict=False) if each == choice}

    def least_seconds(self, chosen: bytes) -> float:
        """Return a lower bound on the step time of every plan within the limit with these choices; infinite if none.

        Notes
        -----
        Let u be a tensor's first use after forward if the tensors chosen so far are dropped; more drops make it
        earlier, never later. Undecided tensors need memory only where every plan needs it, and time only by rule 6. In
        every plan with these choices:

        1. A tensor is resident up to its last use in forward, and from u on. A kept one is resident in between too.
        2. The rest of the limit is the room of a node for the swapped tensors that are not in use there. If they do not
           all fit, some have been released. Copy-outs are FIFO in pack order. So the node is not ready before the end
           of the copy-out at which the tensors copied out so far, of those that can be away at the node, leave no more
           than the room.
        3. A tensor is copied in after it was copied out, and before u.
        4. Copy-ins are FIFO. Of the swapped tensors with u at or before a node, those that are back at an earlier node
           fit in its room together. The others are copied in between the end of the earlier node and the start of the
           later one. They have at least the bytes of all of them less the largest sum of a subset that fits.
        5. A dropped tensor is recomputed at u, if no undecided tensor can make u earlier: those that are recomputed
           from it are decided, and are kept, or swapped, or recomputed at their own u in turn.
        6. At the fullest node, undecided tensors are away whose bytes are at least those of all that can be away there,
           less the room. Some of these bytes are copied out before the node, behind the swapped tensors packed before
           the first of them. The others are dropped: a fractional knapsack gives the least time to recompute them,
           after the node and up to the last u. The best share is taken.
        7. Nodes run one after another. The step takes at least the time of all nodes and recipes.

        Times are monotone: if some durations are left out, no node starts later.
        """
        choices = {tensor.id: choice for tensor, choice in zip(self.order, chosen, strict=False)}
        dropped = {i for i, choice in choices.items() if choice == DROPPED}
        uses = first_uses(self._trace, dropped)
        room = self._room.copy()
        swapped = []
        for tensor in self._trace.tensors:
            first, use = tensor.last_forward + 1, uses[tensor.id]
            choice = choices.get(tensor.id)
            if use < tensor.first_backward or choice == KEPT:
                room[first if choice == KEPT else max(first, use) : tensor.first_backward] -= tensor.bytes
            if choice == SWAPPED and first < use:
                swapped.append(tensor)
        if room.size and int(room.min()) < 0:
            return float("inf")
        seconds, least = self._seconds.copy(), sum(self._seconds)
        for i in dropped:
            least += self._recipes[i].seconds
        for i in self._final(dropped, choices):
            seconds[uses[i]] += self._recipes[i].seconds
        rest = self._rest(choices, uses, int(room[self._fullest])) if room.size else None
        return max(least, self._end(swapped, uses, room, seconds, rest)) if swapped or rest else least

    def _rest(self, decided: Collection[int], uses: Mapping[int, int], room_bytes: int) -> _Rest | None:
        """Return the undecided tensors of the fullest node; None if they all fit there."""
        k = self._fullest
        here = [x for x in self._by_price if x.last_forward < k < uses[x.id] and x.id not in decided]
        away_bytes = sum(x.bytes for x in here) - room_bytes
        if away_bytes <= 0:
            return None
        made = [x for x in here if x.recompute]
        sizes = np.cumsum([0, *(x.bytes for x in made)]).astype(np.float64)
        seconds = np.cumsum([0.0, *(_seconds(x) for x in made)])
        last = max((uses[x.id] for x in made), default=k)
        return _Rest(k, last, min((x.packed, x.id) for x in here), away_bytes, sizes, seconds)

    def _final(self, dropped: Collection[int], decided: Collection[int]) -> set[int]:
        """Return the dropped tensors whose first use the undecided tensors cannot change."""
        final: set[int] = set()
        for i in sorted(dropped, key=self._last_first.__getitem__):
            if all(j in decided and (j in final or j not in dropped) for j in self._made_from[i]):
                final.add(i)
        return final

    def _end(
        self,
        swapped: Sequence[SavedTensor],
        uses: Mapping[int, int],
        room: Ints,
        seconds: Sequence[float],
        rest: _Rest | None,
    ) -> float:
        """Return the end of the step by rules 2 to 7 of `least_seconds`."""
        link, clock = self._link, list(accumulate(seconds, initial=0.0))
        swapped = sorted(swapped, key=lambda x: (x.packed, x.id))
        by_use = sorted(swapped, key=lambda x: uses[x.id])
        packs: dict[int, list[SavedTensor]] = {}
        backs: dict[int, list[SavedTensor]] = {}
        leaving = -room
        for x in swapped:
            leaving[x.last_forward + 1 : uses[x.id]] += x.bytes
            packs.setdefault(x.packed, []).append(x)
            backs.setdefault(uses[x.id], []).append(x)
        over = np.flatnonzero(leaving > 0).tolist()
        tight = _tightest(over, room, sorted(backs))
        crowded = set(over)
        out_end: dict[int, float] = {}
        back_by: dict[int, float] = {}
        delay = channel_free = rest_from = rest_by = 0.0
        others = (rest.first[0], rest.node, rest.last) if rest else ()
        for k in sorted({*over, *packs, *backs, *others}):
            now = clock[k] + delay
            here = [x for x in swapped if x.last_forward < k < uses[x.id]] if k in crowded else []
            left = int(leaving[k])
            for x in here:
                left -= x.bytes
                if left <= 0:
                    now = max(now, out_end[x.id])
                    break
            for x in backs.get(k, ()):
                now = max(now, out_end[x.id] + link.latency + x.bytes / link.in_bandwidth, back_by.get(k, 0.0))
            if rest and k == rest.node:
                now, by = rest.least(now, rest_from, link.out_bandwidth)
                rest_by = by + clock[rest.last + 1] - clock[k]
            ended = now + seconds[k]
            if rest and k == rest.last:
                ended = max(ended, rest_by)
            delay = ended - clock[k + 1]
            if k in tight:
                sizes: list[int] = []
                for x in by_use:
                    if x.last_forward < k < uses[x.id]:
                        sizes.append(x.bytes)
                        copied = sum(sizes) - _most_within(tuple(sizes), int(room[k]))
                        at = ended + copied / link.in_bandwidth
                        back_by[uses[x.id]] = max(at, back_by.get(uses[x.id], 0.0))
            for x in packs.get(k, ()):
                channel_free = max(ended, channel_free) + link.latency + x.bytes / link.out_bandwidth
                out_end[x.id] = channel_free
                if rest and (x.packed, x.id) < rest.first:
                    rest_from = channel_free
            if rest and k == rest.first[0]:
                rest_from = max(rest_from, ended)
        return clock[-1] + delay


@dataclass(frozen=True, slots=True)
class _Rest:
    """Undecided tensors of the fullest node, of which some must be away there.

    Parameters
    ----------
    node, last : int
        The fullest node, and the last node at which one of the tensors is recomputed.
    first : tuple of int
        Pack node and id of the tensor that is packed first.
    away_bytes : int
        How many bytes must be away.
    sizes, seconds : array
        The bytes of the cheapest tensors that can be recomputed, and the seconds of their recipes; both from 0 on.
    """

    node: int
    last: int
    first: tuple[int, int]
    away_bytes: int
    sizes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def least(self, start: float, free: float, bandwidth: float) -> tuple[float, float]:
        """Return the least start of the node, and the least sum of its start and the seconds of recomputation.

        `start` is a lower bound on its start, `free` one on the start of copy-outs.
        """
        most = min(self.away_bytes, float(self.sizes[-1]))
        covered = self.away_bytes - (start - free) * bandwidth  # as many bytes dropped: copies end at `start`
        dropped = np.clip([*self.sizes, most, covered], 0.0, most)
        copied = self.away_bytes - dropped
        starts = np.where(copied > 0, np.maximum(start, free + copied / bandwidth), start)
        return float(starts.min()), float((starts + np.interp(dropped, self.sizes, self.seconds)).min())


def _tightest(nodes: Sequence[int], room: Ints, uses: Sequence[int]) -> set[int]:
    """Return the nodes of which no later one before the next use has as little room: the others bound no copy-in."""
    tight = set()
    before, least = -1, 0
    for k in reversed(nodes):
        part = bisect_right(uses, k)
        if part != before or room[k] < least:
            before, least = part, int(room[k])
            tight.add(k)
    return tight


def _most_within(sizes: tuple[int, ...], room: int) -> int:
    """Return the largest sum of some of the sizes that is at most the room, or no less than that."""
    total = sum(sizes)
    if total <= room:
        return total
    if len(sizes) > _SUBSETS_MAX:
        return room
    sums = _subset_sums(sizes)
    return int(sums[sums.searchsorted(room, side="right") - 1])


@lru_cache(maxsize=4096)
def _subset_sums(sizes: tuple[int, ...]) -> Ints:
    sums: Ints = np.zeros(1, dtype=np.int64)
    for size in sizes:
        sums = np.unique(np.concatenate((sums, sums + size)))
    return sums


def _seconds(tensor: SavedTensor) -> float:
    return tensor.recompute.seconds if tensor.recompute else float("inf")
