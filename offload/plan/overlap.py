"""Optimizer state that is written in forward and read in backward, where a plan leaves memory free.

Forward begins, and backward ends, with few activations in memory. There, more of the optimizer state that moves can be
in memory than `Update` allows in every node, so that its copies overlap with the passes instead of delaying the update.
`control/state_plan.py` asks for the overlap of each plan, and `optimizer_state/in_passes.py` follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from offload.plan.cycle import CycleTiming, Update, away_in_update, simulate_cycle, unrolled
from offload.plan.result import Plan
from offload.plan.simulate import Timing, resident_bytes
from offload.plan.trace import Trace
from offload.units import format_bytes, format_seconds

__all__ = ["StateOverlap", "state_overlap"]

_ROWS_MAX = 32  # nodes of each pass at which state is written or read
# Shares of the free memory, in forward and in backward, that are tried.
_SHARES = [(write, read) for n in (0.25, 0.5, 1.0) for write, read in ((n, 0.0), (0.0, n), (n, n))]
_NOTABLE = 1e-3  # a cycle that is shorter by less than this share is not worth more memory
_LINK_SHARE = 0.8  # share of the time in which the plan reads nothing that is assumed to suffice for reading state

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateOverlap:
    """How much state may be in memory in forward and backward, beyond the state that stays.

    Parameters
    ----------
    behind_bytes : int
        Bytes that may still be written during the update and as forward begins, instead of `Update.behind_bytes`.
    writes : tuple of (int, int)
        For some nodes of forward and the first one of backward, in order: the bytes that may still be written from
        this node on. The node waits for the oldest copy-outs.
    reads : tuple of (int, int)
        For some nodes of backward, in order: the bytes of state whose copy-ins have begun when this node begins, in the
        order of the update. In the last backward pass before an update only.
    timing, fixed_timing : CycleTiming
        Of the cycle with and without this overlap.
    """

    behind_bytes: int
    writes: Rows
    reads: Rows
    timing: CycleTiming
    fixed_timing: CycleTiming

    def __str__(self) -> str:
        return (
            f"optimizer state: up to {format_bytes(self.read_bytes)} are read in backward, and up to "
            f"{format_bytes(self.behind_bytes)} are still written in forward; a cycle takes "
            f"{format_seconds(self.timing.seconds)} instead of {format_seconds(self.fixed_timing.seconds)}"
        )

    @property
    def rows(self) -> list[tuple[int, bool, int]]:
        """Both kinds of rows in order: the node, whether state is read there, the bytes."""
        writes = ((node, False, nbytes) for node, nbytes in self.writes)
        reads = ((node, True, nbytes) for node, nbytes in self.reads)
        return sorted([*writes, *reads])

    @property
    def read_bytes(self) -> int:
        """Bytes of state that are read in backward."""
        return self.reads[-1][1] if self.reads else 0


def state_overlap(
    plan: Plan, update: Update, moved: Collection[int], counted_bytes: int, held_bytes: int, *, noise: float = 0.01
) -> StateOverlap | None:
    """Return the overlap with which a cycle is shortest, without more memory at its peak.

    Parameters
    ----------
    plan : Plan
        The plan of forward and backward.
    update : Update
        The update.
    moved : collection of int
        The numbers of the chunks that move.
    counted_bytes : int
        How many bytes of the state of `update` the plan's base bytes include.
    held_bytes : int
        What is in use during the update, without this state.
    noise : float, default 0.01
        The least relative gain for which copies overlap.

    Returns
    -------
    StateOverlap or None
        None if the cycle gets shorter by at most `noise`. The peak of forward and backward is at most the plan's, and
        that of the update at most the larger of the plan's and its own without overlap.
    """
    if not moved or not any(node.backward for node in plan.trace.nodes):
        return None
    room = _Room(plan, update, frozenset(moved), counted_bytes, held_bytes)
    trace = plan.recomputed_trace

    def timing_of(away: dict[int, tuple[int, int]]) -> CycleTiming:
        return simulate_cycle(trace, plan.swaps, plan.link, update, moved, away)

    fixed = timing_of(away_in_update(update, moved, len(trace.nodes)))
    best, least = None, (1 - noise) * fixed.seconds
    for write, read in _SHARES:
        overlap = StateOverlap(*room.writes(write), room.reads(read), fixed, fixed)
        away = _away(update, moved, len(trace.nodes), overlap)
        if (overlap.behind_bytes > update.behind_bytes or overlap.reads) and room.has(away):
            timing = timing_of(away)
            if timing.seconds < least:
                best, least = replace(overlap, timing=timing), (1 - _NOTABLE) * timing.seconds
    return best


class _Room:
    """The memory that a plan leaves free in each node of forward and backward."""

    def __init__(self, plan: Plan, update: Update, moved: frozenset[int], counted_bytes: int, held_bytes: int) -> None:
        self._update = update
        self._nodes = plan.recomputed_trace.nodes
        timing = plan.timing
        self._moved_bytes = update.bytes_of(moved)
        self._kept = update.bytes - self._moved_bytes
        self._writing = max(0, counted_bytes - self._kept)  # counted in each node of the plan, as still being written
        self._others = [nbytes - self._kept - self._writing for nbytes in timing.resident]  # without this state
        self._peak = max(timing.resident)
        self._held_bytes = max(held_bytes, self._others[-1])  # what backward leaves in memory is there in the update
        _, before = self._peaks(away_in_update(update, moved, len(self._nodes)))
        self._update_peak = max(self._peak, before)
        free = [self._peak - nbytes for nbytes in timing.resident]
        self._before = list(accumulate(free, min))  # the least in any node up to this one
        self._after = list(accumulate(reversed(free), min))[::-1]  # the least in any node from this one on
        self._step = max(1, self._moved_bytes // _ROWS_MAX)
        self._backward = [n for n, node in enumerate(self._nodes) if node.backward]
        self._deliverable = _deliverable(plan, timing)

    def writes(self, share: float) -> tuple[int, Rows]:
        """Return the bytes that may still be written as forward begins, and the rows of `StateOverlap.writes`."""
        more = int(share * min(self._before[0], self._moved_bytes - self._writing))
        if more <= 0:
            return self._update.behind_bytes, ()
        rows: list[tuple[int, int]] = []
        behind = allowed = self._writing + more
        for node, free in enumerate(self._before[: self._backward[0]]):
            if allowed > self._writing + free:
                allowed = max(self._writing, self._writing + free - self._step)
                rows.append((node, allowed))
        if allowed > self._writing:  # in backward there is state that is read
            rows.append((self._backward[0], self._writing))
        return behind, tuple(rows)

    def reads(self, share: float) -> Rows:
        """Return the rows of `StateOverlap.reads`: as late as the link allows, because saved tensors are read too."""
        last = self._backward[-1]
        whole = int(share * min(self._after[last], self._moved_bytes))
        rows: list[tuple[int, int]] = []
        begun = 0
        for node in self._backward:
            later = self._deliverable[node + 1] if node < last else 0
            wanted = min(self._after[node], max(0, whole - later))
            if wanted >= begun + self._step or (node == last and wanted > begun):
                begun = wanted
                rows.append((node, begun))
        return tuple(rows)

    def has(self, away: dict[int, tuple[int, int]]) -> bool:
        """Return whether all state of these chunks that is in memory at a time fits below the peaks."""
        in_passes, in_update = self._peaks(away)
        return in_passes <= self._peak and in_update <= self._update_peak

    def _peaks(self, away: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Return the peaks of the passes and of the update."""
        update, count = self._update, len(self._nodes)
        empty = Trace(self._nodes, (0,) * count, ())
        whole, every = unrolled(empty, [], update, away, periods=3)
        begin, end = len(update.chunks) + count, 2 * (len(update.chunks) + count)
        state = [self._kept + nbytes for nbytes in resident_bytes(whole, every)[begin:end]]
        for i in away:  # `unrolled` has it twice at its update: as state that came back and as state that leaves
            state[i] -= update.chunks[i].bytes
        in_update, in_passes = state[: len(update.chunks)], state[len(update.chunks) :]
        return max(map(sum, zip(self._others, in_passes, strict=True))), self._held_bytes + max(in_update)


def _deliverable(plan: Plan, timing: Timing) -> list[int]:
    """Return for each node how many bytes of state can be read from its start to the step's end.

    Copy-ins of the plan come first.
    """
    idle, reading = [], deque((copy.start, copy.end) for copy in timing.copy_ins)  # one after another
    start = 0.0
    for end in timing.finish:
        busy = 0.0
        while reading and reading[0][0] < end:
            busy += max(0.0, min(end, reading[0][1]) - max(start, reading[0][0]))
            if reading[0][1] > end:
                break
            reading.popleft()
        idle.append(max(0.0, end - start - busy))
        start = end
    left = list(accumulate(reversed(idle)))[::-1]
    bandwidth = plan.link.in_bandwidth
    return [int(min(1e18, _LINK_SHARE * seconds * bandwidth)) if seconds else 0 for seconds in left]


def _away(update: Update, moved: Collection[int], length: int, overlap: StateOverlap) -> dict[int, tuple[int, int]]:
    """Return `away` of `unrolled`: when chunks are released and prefetched.

    `length`: number of nodes of forward and backward.
    """
    chunks = len(update.chunks)
    rows = replace(update, behind_bytes=overlap.behind_bytes).swaps(moved)
    prefetch = {i: chunks + length + back for i, (_, back) in rows.items()}
    for i, node in _read(update, sorted(moved), overlap.reads):
        prefetch[i] = chunks + node
    release = {i: out for i, (out, _) in rows.items() if out is not None}
    writing = deque(i for i in sorted(moved) if i not in release)
    writing_bytes = update.bytes_of(writing)
    for node, nbytes in overlap.writes:
        while len(writing) > 1 and writing_bytes > nbytes:
            writing_bytes -= update.chunks[writing[0]].bytes
            release[writing.popleft()] = chunks + node
    return {i: (min(release.get(i, prefetch[i]), prefetch[i]), prefetch[i]) for i in sorted(moved)}


def _read(update: Update, order: Sequence[int], reads: Rows) -> Iterator[tuple[int, int]]:
    """Yield the chunks that are read in backward, each with its node."""
    ends = list(accumulate(update.chunks[i].bytes for i in order))
    for i, end in zip(order, ends, strict=True):
        node = next((node for node, nbytes in reads if nbytes >= end), None)
        if node is None:
            return
        yield i, node
