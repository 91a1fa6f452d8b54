"""How many bytes of activations are in memory while a step runs: as its schedule goes, and with everything kept.

On the data path: a `WeighedCourse` is a course that weighs at every hook. Activations are the tensors saved for
backward that could move, each from the hook that saves it to the backward node that uses it last; what others hold (the
batch, parameters) is none, and neither is what no setting moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from offload.plan import Swap
from offload.plan.trace import Trace
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine, StorageWatch
from offload.runtime.executor import Course, Measured, Stopwatch
from offload.runtime.schedule import Schedule
from offload.runtime.swapped_storage import Lease
from offload.runtime.weak import when_gone


@dataclass(frozen=True)
class Weights:
    """Bytes of activations by node of a schedule.

    Attributes
    ----------
    unswapped
        With everything kept.
    kept
        Of those that the schedule keeps.
    planned
        As the plan has it; by hand nothing.
    """

    unswapped: tuple[int, ...]
    kept: tuple[int, ...]
    planned: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, trace: Trace, swaps: Iterable[Swap]) -> Weights:
        """Those of a step of which `swaps` are planned."""
        planned_swaps = {swap.id: swap for swap in swaps}
        unswapped, kept, planned = [], [], []
        for tensor in trace.tensors:
            span = (tensor.packed + 1, tensor.last_use, tensor.bytes)
            unswapped.append(span)
            swap = planned_swaps.get(tensor.id)
            if swap is None:
                kept.append(span)
                planned.append(span)
            else:
                planned.append((tensor.packed + 1, swap.release - 1, tensor.bytes))
                planned.append((swap.prefetch, tensor.last_use, tensor.bytes))
        node_count = len(trace.nodes)
        return cls(*(_by_node(node_count, spans) for spans in (unswapped, kept, planned)))

    @classmethod
    def by_hand(cls, schedule: Schedule, held: Iterable[int] = ()) -> Weights:
        """Those of a schedule by hand; `held` are pack indices of what somebody else holds anyway."""
        node_count = schedule.order.node_count
        held = set(held)
        unswapped, kept = [], []
        for entry in schedule.order.entries.values():
            last = node_count - 1 if entry.last_use is None else entry.last_use
            span = (entry.packed + 1, last, entry.nbytes)
            if entry.pack_index not in held:
                unswapped.append(span)
            if entry.pack_index not in schedule.swapped:
                kept.append(span)
        return cls(_by_node(node_count, unswapped), _by_node(node_count, kept))


def _by_node(node_count: int, spans: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """Bytes by node, of spans (first node, last node, bytes)."""
    change = [0] * (node_count + 2)
    for first, last, nbytes in spans:
        if first <= last:
            change[first] += nbytes
            change[last + 1] -= nbytes
    return tuple(accumulate(change[:node_count]))


class WeighedCourse(Course):
    """One round on its way through a schedule, weighed.

    Parameters
    ----------
    weights
        What the schedule keeps, by node.
    finds_held
        Whether to look which of the storages that have left somebody else holds: a plan knows.

    Attributes
    ----------
    missed
        Pack indices of what backward asked for before it had begun to come back.
    held
        Pack indices of what has left and is held by somebody else, so that leaving has freed nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        engine: Engine,
        counts: Counts,
        reason: str,
        deviate: Callable[[], None],
        stopwatch: Stopwatch,
        weights: Weights,
        *,
        finds_held: bool = False,
    ) -> None:
        super().__init__(schedule, engine, counts, reason, deviate, stopwatch)
        self.missed: set[int] = set()
        self.held: set[int] = set()
        self._weights = weights
        self._storages: dict[int, StorageWatch] | None = None
        if finds_held:
            self._storages = {}
            when_gone(self, partial(_close_all, self._storages))
        self._step = counts.steps
        self._stayed_bytes = 0  # of what was to leave and could not
        self._peak_bytes = 0
        # What another round has in memory cannot be told from what this one has.
        self._is_weighed = engine.unswapped.now == 0
        self._measured = stopwatch.measured

    @property
    def peak_bytes(self) -> int | None:
        """Most activations in memory at a time; None where they were not weighed."""
        return self._peak_bytes if self._is_weighed and self.on_course else None

    def measured(self, node_count: int) -> Measured | None:
        """What it took; None where it is not over."""
        return self._measured(node_count)

    def late_packs(self, measured: Measured, least_seconds: float) -> dict[int, float]:
        """Seconds waited, by first pack index, for tensors that were not there when backward needed them.

        Those are the ones whose prefetch had not begun, and those it waited for longer than `least_seconds`.
        """
        schedule, waited = self.schedule, dict.fromkeys(self.missed, 0.0)
        for index, seconds in measured.waits.items():
            first = schedule.order.duplicates.get(index, index)
            if first in schedule.swapped:
                waited[first] = waited.get(first, 0.0) + seconds
        return {index: seconds for index, seconds in waited.items() if seconds > least_seconds or index in self.missed}

    def stays(self, pack_index: int, nbytes: int) -> str | None:
        """Why a tensor of this size stays, where the schedule says so; its pack ends with that."""
        reason = super().stays(pack_index, nbytes)
        if reason is not None and self._is_weighed:
            self._weigh(self.schedule.order.node_after_pack.get(pack_index))
        return reason

    def swapped(self, pack_index: int, lease: Lease, tensor: torch.Tensor) -> None:
        """A storage has begun to leave."""
        super().swapped(pack_index, lease, tensor)
        if self._storages is not None:
            self._storages[pack_index] = self._engine.watch_storage(tensor)

    def packed(self, pack_index: int) -> None:
        """The hook of this pack is about to return."""
        super().packed(pack_index)
        if self._is_weighed:
            entry = self.schedule.order.entries.get(pack_index)
            if entry is not None and pack_index in self.schedule.swapped and pack_index not in self._leases:
                self._stayed_bytes += entry.nbytes
            self._weigh(self.schedule.order.node_after_pack.get(pack_index))

    def unpacking(self, pack_index: int) -> None:
        """Backward asks for the tensor of this pack."""
        super().unpacking(pack_index)
        if self._storages is not None:
            self.held = {index for index, storage in self._storages.items() if self._is_held(index, storage)}
            _close_all(self._storages)
            self._storages = None
        first = self.schedule.order.duplicates.get(pack_index, pack_index)
        reference = self._leases.get(first)
        lease = reference() if reference is not None else None
        is_missing = lease is not None and lease.record.is_away
        if is_missing:
            self.missed.add(first)
        if self._is_weighed:
            self._weigh(self._node, lease.record.nbytes if lease is not None and is_missing else 0)

    def _is_held(self, pack_index: int, storage: StorageWatch) -> bool:
        lease = self._leases[pack_index]()
        return lease is not None and lease.record.is_away and not storage.expired()

    def _weigh(self, node: int | None, more_bytes: int = 0) -> None:
        if self._counts.steps != self._step:
            self._is_weighed = False  # another round has begun meanwhile
        elif node is not None:
            now = self._weights.kept[node] + self._stayed_bytes + self._engine.resident.now + more_bytes
            self._peak_bytes = max(self._peak_bytes, now)


def _close_all(watches: dict[int, StorageWatch]) -> None:
    while watches:
        watches.popitem()[1].close()
