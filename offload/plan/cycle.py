"""The optimizer's update and the steps up to the next one, as one cycle: its timing, its memory, a lower bound.

State that leaves memory after its update and comes back for the next one is a tensor that lives across the end of a
step. So the cycle begins with the update, and two periods of it are simulated as one long trace. `share_search` chooses
the state that leaves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offload.plan.joint_bounds import joint_bound
from offload.plan.simulate import Link, Swap, resident_bytes, simulate
from offload.plan.trace import Node, SavedTensor, Trace

__all__ = [
    "CycleTiming",
    "StateChunk",
    "Update",
    "away_in_update",
    "between_bytes",
    "cycle_bound",
    "cycle_bytes",
    "freed",
    "simulate_cycle",
    "unrolled",
]

_CELLS = 64  # number of ranges into which `cycle_bound` divides the moved bytes


@dataclass(frozen=True, slots=True)
class StateChunk:
    """State that leaves and comes back together.

    Parameters
    ----------
    bytes : int
        Size in bytes.
    seconds : float
        Duration of the update that uses it, in seconds, without waits for copies.
    name : str, default ""
        Whose state it is.
    """

    bytes: int
    seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the optimizers, chunk by chunk.

    Parameters
    ----------
    chunks : tuple of StateChunk
        In the order of the update.
    ahead_bytes : int
        Before each chunk's update, copy-ins for later chunks are started in order, until those that have been started
        for later chunks have this many bytes. The copy-in of the next chunk is always started.
    behind_bytes : int
        If more bytes than this are still being written, the update waits for the oldest copy-outs, but never for the
        latest one.
    micro_batches : int, default 1
        Forward and backward passes for each update.
    """

    chunks: tuple[StateChunk, ...]
    ahead_bytes: int
    behind_bytes: int
    micro_batches: int = 1

    @property
    def seconds(self) -> float:
        """Duration without waits, in seconds."""
        return sum(chunk.seconds for chunk in self.chunks)

    @property
    def bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    def bytes_of(self, moved: Collection[int]) -> int:
        """Return the bytes of the chunks with these numbers."""
        return sum(self.chunks[i].bytes for i in moved)

    def swaps(self, moved: Collection[int]) -> dict[int, tuple[int | None, int]]:
        """Return for each chunk that moves, by its number, when it is released and when it is prefetched.

        Returns
        -------
        dict of int to (int or None, int)
            First, the number of the chunk before whose update the moved chunk's copy-out is awaited, so that its memory
            is free. If it equals ``len(chunks)``, the first node after the update waits; if it is None, no node waits.
            Second, the number of the chunk of the next update before which the copy-in is queued.
        """
        order = sorted(moved)
        prefetch = self._prefetches(order)
        release: dict[int, int | None] = dict.fromkeys(order)
        writing: deque[int] = deque()
        writing_bytes = 0
        for i in order:
            writing.append(i)
            writing_bytes += self.chunks[i].bytes
            while len(writing) > 1 and writing_bytes > self.behind_bytes:
                writing_bytes -= self.chunks[writing[0]].bytes
                release[writing.popleft()] = i + 1
        return {i: (release[i], prefetch[i]) for i in order}

    def _prefetches(self, order: Sequence[int]) -> dict[int, int]:
        chosen, prefetch, begun = set(order), {}, 0
        for number in range(len(self.chunks)):
            ahead = self.bytes_of([i for i in range(number + 1, begun) if i in chosen])
            while begun < len(self.chunks) and (begun <= number + 1 or ahead < self.ahead_bytes):
                if begun in chosen:
                    prefetch[begun] = number
                    ahead += self.chunks[begun].bytes if begun > number else 0
                begun += 1
        return prefetch


@dataclass(frozen=True, slots=True)
class CycleTiming:
    """The timing of a cycle, in seconds.

    Parameters
    ----------
    seconds : float
        Duration of the second of two periods; at least the time that the slower channel needs for the copies of state
        of one period, because otherwise this channel would fall further behind in each period.
    update_seconds : float
        Duration of the update, with its waits.
    """

    seconds: float
    update_seconds: float


def unrolled(
    trace: Trace, swaps: Sequence[Swap], update: Update, away: dict[int, tuple[int, int]], periods: int
) -> tuple[Trace, list[Swap]]:
    """Return several periods of a cycle as one trace, with its swaps.

    Parameters
    ----------
    trace : Trace
        Forward and backward.
    swaps : sequence of Swap
        The swaps of forward and backward.
    update : Update
        One node for each of its chunks comes before forward.
    away : dict of int to (int, int)
        For each chunk that moves, by its number: its release node and its prefetch node, counted from the beginning of
        the period in which it leaves. The prefetch node is at most the node of the chunk's update in the next period.
    periods : int
        How many; a node without duration follows the last one.

    Returns
    -------
    tuple of Trace and list of Swap
        Base bytes of update nodes are 0.
    """
    chunks, own = len(update.chunks), max((tensor.id for tensor in trace.tensors), default=-1) + 1
    length, count = chunks + len(trace.nodes), own + chunks
    nodes: list[Node] = []
    tensors: list[SavedTensor] = []
    every: list[Swap] = []
    end = periods * length
    for period in range(periods):
        begin, ids = period * length, period * count
        nodes += [Node(chunk.name, chunk.seconds, backward=False) for chunk in update.chunks]
        nodes += trace.nodes
        at = begin + chunks
        for x in trace.tensors:
            first, last = (
                (at + x.produced, at + x.packed, at + x.last_forward),
                (at + x.first_backward, at + x.last_use),
            )
            tensors.append(SavedTensor(ids + x.id, x.bytes, *first, *last, copy_bytes=x.copy_bytes))
        every += [Swap(ids + x.id, at + x.release, at + x.prefetch) for x in swaps]
        for i, (release, prefetch) in away.items():
            use = min(begin + length + i, end)
            updated = begin + i
            tensors.append(SavedTensor(ids + own + i, update.chunks[i].bytes, updated, updated, updated, use, use))
            every.append(Swap(ids + own + i, min(begin + release, use), min(begin + prefetch, use)))
    nodes.append(Node("", 0.0, backward=False))
    base = [*([0] * chunks + list(trace.base_bytes)) * periods, 0]
    return Trace(tuple(nodes), tuple(base), tuple(tensors)), every


def away_in_update(update: Update, moved: Collection[int], length: int) -> dict[int, tuple[int, int]]:
    """Return `away` of `unrolled` for chunks that are read in the update, and written as `Update.behind_bytes` allows.

    `length`: number of nodes of forward and backward.
    """
    period = len(update.chunks) + length
    rows = update.swaps(moved)
    return {i: (period + back if out is None else out, period + back) for i, (out, back) in rows.items()}


def simulate_cycle(
    trace: Trace,
    swaps: Sequence[Swap],
    link: Link,
    update: Update,
    moved: Collection[int],
    away: dict[int, tuple[int, int]] | None = None,
) -> CycleTiming:
    """Return the timing of a cycle in which some chunks of state move.

    Parameters
    ----------
    trace : Trace
        Forward and backward, with recomputation as part of its nodes.
    swaps : sequence of Swap
        The swaps of forward and backward.
    link : Link
        Bandwidths and latency. Copies of state and of saved tensors use the same channels.
    update : Update
        The update.
    moved : collection of int
        The numbers of the chunks that leave.
    away : dict of int to (int, int), optional
        When each of them is released and prefetched, as in `unrolled`. By default, as `Update.swaps` says.

    Returns
    -------
    CycleTiming
        By the rules of `simulate`. Of several micro-batches, only the first overlaps with copies of state.

    Examples
    --------
    >>> from offload.plan.trace import Node, Trace
    >>> step = Trace((Node("f", 1.0, False), Node("b", 1.0, True)), (0, 0), ())
    >>> update = Update((StateChunk(10, 0.5), StateChunk(10, 0.5)), ahead_bytes=10, behind_bytes=10)
    >>> simulate_cycle(step, [], Link(10.0, 10.0), update, {1})
    CycleTiming(seconds=3.5, update_seconds=1.5)
    """
    chunks = len(update.chunks)
    if away is None:
        away = away_in_update(update, moved, len(trace.nodes))
    whole, every = unrolled(trace, swaps, update, away, periods=2)
    timing = simulate(whole, every, link)
    length = chunks + len(trace.nodes)
    second, forward = timing.finish[length - 1], timing.finish[length + chunks - 1]
    nbytes, latency = update.bytes_of(moved), link.latency * len(moved)
    copies = latency + nbytes / min(link.out_bandwidth, link.in_bandwidth)
    more = update.micro_batches - 1
    others = more * simulate(trace, swaps, link).step_seconds if more else 0.0
    return CycleTiming(max(timing.finish[2 * length - 1] - second + others, copies), forward - second)


def cycle_bytes(update: Update, moved: Collection[int]) -> tuple[int, int]:
    """Return the bytes of state in memory: the most during an update, and those between updates.

    Parameters
    ----------
    update : Update
        The update.
    moved : collection of int
        The numbers of the chunks that leave.

    Returns
    -------
    tuple of int
        In both figures, state that is being written counts until a node has waited for it. Between updates this is
        assumed to be `behind_bytes` (all moved state, if that is less), or the last chunk that moves if it is larger.
    """
    chunks, kept = len(update.chunks), update.bytes - update.bytes_of(moved)
    if not moved:
        return kept, kept
    empty = Trace((Node("", 0.0, backward=False),), (0,), ())
    whole, every = unrolled(empty, [], update, away_in_update(update, moved, 1), periods=3)
    resident = list(resident_bytes(whole, every))
    begin = chunks + 1
    for i in moved:  # `unrolled` has it twice at its update: as state that came back and as state that leaves
        resident[begin + i] -= update.chunks[i].bytes
    return kept + max(resident[begin : begin + chunks]), between_bytes(update, moved)


def between_bytes(update: Update, moved: Collection[int]) -> int:
    """Return the second figure of `cycle_bytes` alone."""
    moved_bytes = update.bytes_of(moved)
    writing = update.bytes_of([i for i, (release, _) in update.swaps(moved).items() if release is None])
    return update.bytes - moved_bytes + max(writing, min(moved_bytes, update.behind_bytes))


def cycle_bound(trace: Trace, limit_bytes: int, link: Link, update: Update) -> float:
    """Return a lower bound on the duration of a cycle within a limit, whatever state moves.

    Parameters
    ----------
    trace : Trace
        Forward and backward, with all state in its base bytes.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    link : Link
        Bandwidths. The bound does not use the latency.
    update : Update
        The update.

    Returns
    -------
    float
        Seconds; infinite if no share of the state makes the limit feasible.

    Notes
    -----
    Let M bytes of state move. Saved tensors exist in forward and backward only, and there at least the other state is
    resident. So each pass takes at least `joint_bound` with M fewer base bytes. This gives a first bound on the cycle:
    the time of its update and its passes together. In a cycle that repeats itself, M bytes go through each channel in
    each period. This gives a second bound: the time of these copies. Both hold however copies overlap with each other
    and with nodes. The larger of the two is a bound for M, and its minimum over M is the result. M is divided into
    ranges, the cells. For a cell, the first bound is computed for its largest M and the second for its smallest, so the
    bound holds for every M in the cell.
    """
    bandwidth = min(link.out_bandwidth, link.in_bandwidth)
    ends = sorted({update.bytes * i // _CELLS for i in range(_CELLS + 1)})
    cells = [(0, 0), *((left + 1, right) for left, right in pairwise(ends))]  # least and most bytes

    def computing(cell: int) -> float:
        passes = joint_bound(freed(trace, cells[cell][1]), limit_bytes, link)
        return update.seconds + update.micro_batches * passes

    # As M grows, the first bound never rises and the second never falls. So the minimum is where they cross.
    low, high = -1, len(cells) - 1
    below, best = math.inf, max(computing(high), cells[high][0] / bandwidth)
    while high - low > 1:
        cell = (low + high) // 2
        seconds, copies = computing(cell), cells[cell][0] / bandwidth
        if seconds > copies:
            low, below = cell, seconds
        else:
            high, best = cell, copies
    return min(below, best)


def freed(trace: Trace, nbytes: int) -> Trace:
    """Return the trace with fewer base bytes."""
    return replace(trace, base_bytes=tuple(max(0, base - nbytes) for base in trace.base_bytes))
