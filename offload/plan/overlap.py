"""Optimizer state whose copy-outs end in forward and whose copy-ins begin in backward, where a plan leaves memory free.

Forward begins, and backward ends, with few activations in memory. `Update` allows the same bytes of optimizer state in
flight in every node. In these nodes there is room for more, so that copies overlap with forward and backward instead of
delaying the update. In this file, "written" and "read" mean copied to and from the store.
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
# The overlaps that are tried: (share of the free memory used in forward, share used in backward).
_SHARES = [(write, read) for n in (0.25, 0.5, 1.0) for write, read in ((n, 0.0), (0.0, n), (n, n))]
_NOTABLE = 1e-3  # an overlap with more memory is better if its cycle is shorter by at least this fraction
_LINK_SHARE = 0.8  # state is read in at most this fraction of the time in which the plan reads nothing

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateOverlap:
    """How much state may be in memory in forward and backward, beyond the state that stays.

    Parameters
    ----------
    behind_bytes : int
        Bytes that may be in flight to the store during the update and as forward begins. Replaces
        `Update.behind_bytes`.
    writes : tuple of (int, int)
        (node, bytes), sorted: before this node, the step waits for the oldest copy-outs until at most this many bytes
        are in flight. The nodes are in forward; the last one can be the first node of backward.
    reads : tuple of (int, int)
        (node, bytes), sorted: from this node of backward on, up to this many bytes of state may have been read, in the
        order of the update. Only the last backward pass before an update reads state.
    timing : CycleTiming
        The cycle with this overlap.
    baseline_timing : CycleTiming
        The cycle without an overlap.
    """

    behind_bytes: int
    writes: Rows
    reads: Rows
    timing: CycleTiming
    baseline_timing: CycleTiming

    def __str__(self) -> str:
        return (
            f"optimizer state: up to {format_bytes(self.read_bytes)} are read in backward, and up to "
            f"{format_bytes(self.behind_bytes)} are still written in forward; a cycle takes "
            f"{format_seconds(self.timing.seconds)} instead of {format_seconds(self.baseline_timing.seconds)}"
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
        Bytes of the state of `update` that the plan's base bytes include.
    held_bytes : int
        Bytes in use during the update, without this state.
    noise : float, default 0.01
        An overlap has to make the cycle shorter by more than this fraction.

    Returns
    -------
    StateOverlap or None
        None if no overlap makes the cycle short enough. The peak of forward and backward is at most the plan's, and
        that of the update at most the larger of the plan's and its own without overlap.
    """
    if not moved or not any(node.backward for node in plan.trace.nodes):
        return None
    room = _Room(plan, update, frozenset(moved), counted_bytes, held_bytes)
    trace = plan.recomputed_trace

    def timing_of(away: dict[int, tuple[int, int]]) -> CycleTiming:
        return simulate_cycle(trace, plan.swaps, plan.link, update, moved, away)

    baseline = timing_of(away_in_update(update, moved, len(trace.nodes)))
    best, seconds_max = None, (1 - noise) * baseline.seconds
    for write, read in _SHARES:
        overlap = StateOverlap(*room.writes(write), room.reads(read), baseline, baseline)
        away = _schedule_of(update, moved, len(trace.nodes), overlap)
        if (overlap.behind_bytes > update.behind_bytes or overlap.reads) and room.fits(away):
            timing = timing_of(away)
            if timing.seconds < seconds_max:
                best, seconds_max = replace(overlap, timing=timing), (1 - _NOTABLE) * timing.seconds
    return best


class _Room:
    """The memory that a plan leaves free in each node of forward and backward."""

    def __init__(self, plan: Plan, update: Update, moved: frozenset[int], counted_bytes: int, held_bytes: int) -> None:
        self._update = update
        self._nodes = plan.recomputed_trace.nodes
        timing = plan.timing
        self._moved_bytes = update.bytes_of(moved)
        self._kept_bytes = update.bytes - self._moved_bytes
        self._writing_bytes = max(0, counted_bytes - self._kept_bytes)  # in flight in each node, by the plan's account
        self._other_bytes = [nbytes - self._kept_bytes - self._writing_bytes for nbytes in timing.resident]
        self._peak_bytes = max(timing.resident)
        self._held_bytes = max(held_bytes, self._other_bytes[-1])  # the last node's memory is in use in the update too
        _, update_peak_bytes = self._peaks(away_in_update(update, moved, len(self._nodes)))
        self._update_peak_bytes = max(self._peak_bytes, update_peak_bytes)
        free = [self._peak_bytes - nbytes for nbytes in timing.resident]
        self._free_before = list(accumulate(free, min))  # the least in any node up to this one
        self._free_after = list(accumulate(reversed(free), min))[::-1]  # the least in any node from this one on
        self._row_bytes = max(1, self._moved_bytes // _ROWS_MAX)  # by at least so much, rows differ
        self._backward = [n for n, node in enumerate(self._nodes) if node.backward]
        self._deliverable_bytes = _deliverable_bytes(plan, timing)

    def writes(self, share: float) -> tuple[int, Rows]:
        """Return the bytes that may still be written as forward begins, and the rows of `StateOverlap.writes`."""
        more = int(share * min(self._free_before[0], self._moved_bytes - self._writing_bytes))
        if more <= 0:
            return self._update.behind_bytes, ()
        rows: list[tuple[int, int]] = []
        behind = allowed = self._writing_bytes + more
        for node, free in enumerate(self._free_before[: self._backward[0]]):
            if allowed > self._writing_bytes + free:
                allowed = max(self._writing_bytes, self._writing_bytes + free - self._row_bytes)
                rows.append((node, allowed))
        if allowed > self._writing_bytes:  # from backward on, this memory is for state that is read
            rows.append((self._backward[0], self._writing_bytes))
        return behind, tuple(rows)

    def reads(self, share: float) -> Rows:
        """Return the rows of `StateOverlap.reads`.

        State is read as late as the link allows, so that it does not delay the saved tensors that are read before.
        """
        last = self._backward[-1]
        whole = int(share * min(self._free_after[last], self._moved_bytes))
        rows: list[tuple[int, int]] = []
        begun = 0
        for node in self._backward:
            later = self._deliverable_bytes[node + 1] if node < last else 0
            wanted = min(self._free_after[node], max(0, whole - later))
            if wanted >= begun + self._row_bytes or (node == last and wanted > begun):
                begun = wanted
                rows.append((node, begun))
        return tuple(rows)

    def fits(self, away: dict[int, tuple[int, int]]) -> bool:
        """Return whether this schedule of the chunks stays within the peaks of the passes and of the update."""
        in_passes, in_update = self._peaks(away)
        return in_passes <= self._peak_bytes and in_update <= self._update_peak_bytes

    def _peaks(self, away: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Return the peaks of the passes and of the update."""
        update, count = self._update, len(self._nodes)
        empty = Trace(self._nodes, (0,) * count, ())
        whole, all_swaps = unrolled(empty, [], update, away, periods=3)
        begin, end = len(update.chunks) + count, 2 * (len(update.chunks) + count)
        state = [self._kept_bytes + nbytes for nbytes in resident_bytes(whole, all_swaps)[begin:end]]
        for i in away:  # `unrolled` counts a chunk twice at its update: as read, and as about to be written
            state[i] -= update.chunks[i].bytes
        in_update, in_passes = state[: len(update.chunks)], state[len(update.chunks) :]
        return max(map(sum, zip(self._other_bytes, in_passes, strict=True))), self._held_bytes + max(in_update)


def _deliverable_bytes(plan: Plan, timing: Timing) -> list[int]:
    """Return for each node how many bytes of state can be read from its start to the step's end.

    Copy-ins of saved tensors come first.
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


def _schedule_of(
    update: Update, moved: Collection[int], length: int, overlap: StateOverlap
) -> dict[int, tuple[int, int]]:
    """Return when chunks are released and prefetched: the argument `away` of `unrolled`.

    `length`: number of nodes of forward and backward.
    """
    chunks = len(update.chunks)
    in_update = replace(update, behind_bytes=overlap.behind_bytes).swaps(moved)
    prefetch = {i: chunks + length + back for i, (_, back) in in_update.items()}
    for i, node in _chunks_read(update, sorted(moved), overlap.reads):
        prefetch[i] = chunks + node
    release = {i: out for i, (out, _) in in_update.items() if out is not None}
    writing = deque(i for i in sorted(moved) if i not in release)
    writing_bytes = update.bytes_of(writing)
    for node, nbytes in overlap.writes:
        while len(writing) > 1 and writing_bytes > nbytes:
            writing_bytes -= update.chunks[writing[0]].bytes
            release[writing.popleft()] = chunks + node
    return {i: (min(release.get(i, prefetch[i]), prefetch[i]), prefetch[i]) for i in sorted(moved)}


def _chunks_read(update: Update, order: Sequence[int], reads: Rows) -> Iterator[tuple[int, int]]:
    """Yield the chunks that are read in backward, each with its node."""
    ends = list(accumulate(update.chunks[i].bytes for i in order))
    for i, end in zip(order, ends, strict=True):
        node = next((node for node, nbytes in reads if nbytes >= end), None)
        if node is None:
            return
        yield i, node
