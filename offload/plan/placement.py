"""From the set of tensors that swap to the nodes at which each leaves and returns.

Place on the data path: between the search, which chooses the set, and `simulate`, which is the law. Tensors are
numbered here in the order of the copy-out channel, (packed, id), so that a tensor's number is its place in the queue.

Given the set, little is left to choose. Copy-outs keep their order, so memory needed at a node is had earliest by
releasing the head of the queue: each tensor is released at the first node that finds its copy ended, or before, where
memory needs it, and compute waits. Copy-ins are taken in the order of use; each begins as late as the channel allows
without a stall, or at the first node from which its bytes fit until its use. A tensor whose copy-in would begin
before its release has nothing to give and is kept.
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

__all__ = ["Schedule", "Stall", "Step"]

_FAR = 40  # nodes; from here on numpy beats a loop

Ints = NDArray[np.int64]
_NO_HOLDS: Mapping[int, int] = {}


class Stall(NamedTuple):
    """Compute waits `seconds` at `node` for a copy of tensor `number`, out or in."""

    seconds: float
    node: int
    number: int
    is_out: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """What became of one set of tensors.

    Parameters
    ----------
    step_seconds : float
        Step time, up to rounding (`simulate` says it to the bit), and by how much its swaps slow computation.
    numbers, releases, prefetches : tuple of int
        The swapped tensors in copy-out order, and their nodes.
    stalls : tuple of Stall
        Where compute waits, in order.
    holds : mapping of int to int
        Tensors held back, and until which node, so that others could return before them.
    """

    step_seconds: float
    numbers: tuple[int, ...]
    releases: tuple[int, ...]
    prefetches: tuple[int, ...]
    stalls: tuple[Stall, ...]
    holds: Mapping[int, int] = field(default_factory=dict)


class Step:
    """A trace and a link, laid out for quick scheduling.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    """

    def __init__(self, trace: Trace, link: Link) -> None:
        tensors = sorted(trace.tensors, key=lambda x: (x.packed, x.id))
        self.trace, self.link = trace, link
        self.node_count, self.count = len(trace.nodes), len(tensors)
        self.ids = [x.id for x in tensors]
        self.bytes = [x.bytes for x in tensors]
        self.packed = [x.packed for x in tensors]
        self.free_from = [x.last_forward + 1 for x in tensors]
        self.back_at = [x.first_backward for x in tensors]
        self.out_seconds = [link.latency + x.bytes / link.out_bandwidth for x in tensors]
        self.in_seconds = [link.latency + x.bytes / link.in_bandwidth for x in tensors]
        self.overhead_seconds = [link.overhead_seconds(x.bytes) for x in tensors]
        self.seconds = [node.seconds for node in trace.nodes]
        self.clock = list(accumulate(self.seconds, initial=0.0))
        self.by_use = sorted(range(self.count), key=lambda i: (self.back_at[i], self.ids[i]))
        self.use_rank = [0] * self.count
        for rank, i in enumerate(self.by_use):
            self.use_rank[i] = rank
        self.kept = np.asarray(unswapped_bytes(trace), dtype=np.int64)
        self._clock = np.asarray(self.clock)
        self._bytes = np.asarray(self.bytes, dtype=np.int64)
        self._free_from = np.asarray(self.free_from, dtype=np.int64)
        self._back_at = np.asarray(self.back_at, dtype=np.int64)

    @property
    def compute_seconds(self) -> float:
        """Step time without swaps."""
        return self.clock[-1]

    def swaps(self, schedule: Schedule) -> tuple[Swap, ...]:
        """Return the swaps of a schedule, by id."""
        rows = zip(schedule.numbers, schedule.releases, schedule.prefetches, strict=True)
        return tuple(sorted(Swap(self.ids[i], release, prefetch) for i, release, prefetch in rows))

    def room(self, numbers: Sequence[int], limit_bytes: int) -> Ints:
        """Return per node what is left of the limit while all of `numbers` are away for as long as they can be."""
        at = np.asarray(numbers, dtype=np.int64)
        away = self._span(self._free_from[at], self._back_at[at], self._bytes[at])
        room: Ints = limit_bytes - self.kept + away
        return room

    def schedule(
        self,
        numbers: Iterable[int],
        limit_bytes: int,
        worth_seconds: float = np.inf,
        *,
        lead: float = 1.0,
        holds: Mapping[int, int] = _NO_HOLDS,
    ) -> Schedule | None:
        """Choose the releases and prefetches of a set of tensors.

        Parameters
        ----------
        numbers : iterable of int
            The tensors to swap; those that turn out to be useless are left out of the result.
        limit_bytes : int
            Limit on the resident bytes.
        worth_seconds : float, default infinite
            Step time beyond which the schedule is not wanted.
        lead : float, default 1.0
            Copy-ins begin as early as if each took this many times as long.
        holds : mapping of int to int
            For some tensors, a node before which the prefetch may not be.

        Returns
        -------
        Schedule or None
            None where the set cannot keep the limit, or is slower than `worth_seconds`.
        """
        numbers = sorted(numbers)
        while True:
            room = self.room(numbers, limit_bytes)
            if room.size and int(room.min()) < 0:
                return None
            release, ready = self._leave(numbers, room.tolist())
            stuck = {i for i in numbers if release[i] >= self.back_at[i]}
            if not stuck:
                if ready.size and ready[-1] + self.seconds[-1] + self._overhead(numbers) > worth_seconds:
                    return None
                prefetch = self._return(numbers, room, release, ready, lead, holds)
                stuck = {i for i in numbers if release[i] >= prefetch[i]}
            if not stuck:
                return self._time(numbers, release, prefetch, holds)
            numbers = [i for i in numbers if i not in stuck]

    def earliest_releases(self, numbers: Iterable[int], limit_bytes: int) -> dict[int, int]:
        """Return the releases that `schedule` would choose; those past the tensor's use are of no use."""
        numbers = sorted(numbers)
        return self._leave(numbers, self.room(numbers, limit_bytes).tolist())[0]

    def _span(self, first: Ints, stop: Ints, count: Ints) -> Ints:
        """Return per node the sum of `count` over the ranges [first, stop) that hold it."""
        change = np.bincount(first, weights=count, minlength=self.node_count + 1)
        change -= np.bincount(stop, weights=count, minlength=self.node_count + 1)
        return np.cumsum(change[: self.node_count]).astype(np.int64)

    def _leave(self, numbers: Sequence[int], room: list[int]) -> tuple[dict[int, int], NDArray[np.float64]]:
        """Return the release of each tensor, which may be too late to be of use, and when each node is ready."""
        size, out_seconds = self.bytes, self.out_seconds
        packs = [*(self.packed[i] for i in numbers), -1]
        freed = sorted(numbers, key=self.free_from.__getitem__)
        frees = [*(self.free_from[i] for i in freed), -1]
        out_end: dict[int, float] = {}
        release: dict[int, int] = {}
        pending: list[int] = []  # a heap: packed, no longer needed by forward, not released
        left, held, at_pack, at_free = len(numbers), 0, 0, 0
        k = packs[0] if numbers else self.node_count
        ready = self.clock[:k]
        now, out_free = self.clock[k], 0.0
        while left and k < self.node_count:
            while frees[at_free] == k:
                heapq.heappush(pending, freed[at_free])
                held += size[freed[at_free]]
                at_free += 1
            while pending:
                end = out_end[pending[0]]
                if end > now:
                    if held <= room[k]:
                        break
                    now = end
                i = heapq.heappop(pending)
                release[i] = k
                held -= size[i]
                left -= 1
            ready.append(now)
            now += self.seconds[k]
            while packs[at_pack] == k:
                i = numbers[at_pack]
                out_free = out_end[i] = (now if now > out_free else out_free) + out_seconds[i]
                at_pack += 1
            k += 1
        release.update(dict.fromkeys(pending, self.node_count))
        return release, np.concatenate((ready, self._clock[k:-1] + (now - self.clock[k])))

    def _return(
        self,
        numbers: Sequence[int],
        room: Ints,
        release: dict[int, int],
        ready: NDArray[np.float64],
        lead: float,
        holds: Mapping[int, int],
    ) -> dict[int, int]:
        """Return the prefetch of each tensor, in the order of use."""
        at = np.asarray(numbers, dtype=np.int64)
        gone = np.asarray([release[i] for i in numbers], dtype=np.int64)
        free = room - self._span(self._free_from[at], gone, self._bytes[at])
        order = sorted(numbers, key=self.use_rank.__getitem__)
        backs = self._back_at[order]
        begin, begins = np.inf, []
        for i, use in zip(reversed(order), reversed(ready[backs].tolist()), strict=True):
            begin = (use if use < begin else begin) - self.in_seconds[i] * lead
            begins.append(begin)
        latest = np.searchsorted(ready, begins[::-1], side="right") - 1
        earliest = [max(release[i], holds.get(i, 0)) for i in order]
        first = np.minimum(np.maximum(latest, np.asarray(earliest, dtype=np.int64)), backs)
        take = _take_far if order and float((backs - first).mean()) > _FAR else _take_near
        return dict(zip(order, take(free, first.tolist(), backs.tolist(), self._bytes[order].tolist()), strict=True))

    def _time(
        self, numbers: Sequence[int], release: dict[int, int], prefetch: dict[int, int], holds: Mapping[int, int]
    ) -> Schedule:
        """Return the schedule with its step time; visits only the nodes at which something happens."""
        by_use = sorted(numbers, key=self.use_rank.__getitem__)
        by_release, by_fetch = sorted(numbers, key=release.__getitem__), sorted(by_use, key=prefetch.__getitem__)
        packs, backs = [*(self.packed[i] for i in numbers), -1], [*(self.back_at[i] for i in by_use), -1]
        frees, fetches = [*(release[i] for i in by_release), -1], [*(prefetch[i] for i in by_fetch), -1]
        at_pack = at_back = at_free = at_fetch = 0
        out_end: dict[int, float] = {}
        in_end: dict[int, float] = {}
        out_free = in_free = lag = 0.0
        stalls = []
        for k in sorted({*packs, *frees, *backs, *fetches} - {-1}):
            now = begin = self.clock[k] + lag
            while frees[at_free] == k:
                i = by_release[at_free]
                at_free += 1
                if out_end[i] > now:
                    stalls.append(Stall(out_end[i] - now, k, i, True))
                    now = out_end[i]
            while fetches[at_fetch] == k:
                i = by_fetch[at_fetch]
                at_fetch += 1
                in_free = in_end[i] = (now if now > in_free else in_free) + self.in_seconds[i]
            while backs[at_back] == k:
                i = by_use[at_back]
                at_back += 1
                if in_end[i] > now:
                    stalls.append(Stall(in_end[i] - now, k, i, False))
                    now = in_end[i]
            lag += now - begin
            now += self.seconds[k]
            while packs[at_pack] == k:
                i = numbers[at_pack]
                at_pack += 1
                out_free = out_end[i] = (now if now > out_free else out_free) + self.out_seconds[i]
        releases, prefetches = (tuple(nodes[i] for i in numbers) for nodes in (release, prefetch))
        seconds = self.clock[-1] + lag + self._overhead(numbers)
        return Schedule(seconds, tuple(numbers), releases, prefetches, tuple(stalls), holds)

    def _overhead(self, numbers: Sequence[int]) -> float:
        return sum(map(self.overhead_seconds.__getitem__, numbers))


def _take_near(free: Ints, first: list[int], back: list[int], count: list[int]) -> list[int]:
    """Take memory for one tensor after another, from its use back to `first` or to where its bytes do not fit."""
    room, taken = free.tolist(), []
    for low, k, needed in zip(first, back, count, strict=True):
        while k > low and room[k - 1] >= needed:
            k -= 1
            room[k] -= needed
        taken.append(k)
    return taken


def _take_far(free: Ints, first: list[int], back: list[int], count: list[int]) -> list[int]:
    """Do what `_take_near` does, faster where the distances are long."""
    taken = []
    for low, high, needed in zip(first, back, count, strict=True):
        (full,) = (free[low:high] < needed).nonzero()
        k = low + int(full[-1]) + 1 if full.size else low
        free[k:high] -= needed
        taken.append(k)
    return taken
