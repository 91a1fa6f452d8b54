"""How many bytes of activations are in memory while a step runs: as its schedule goes, and with everything kept.

A `MeteredExecutor` also adds up activation bytes at every hook. Activations are tensors saved for
backward that could be swapped, each from the hook that saves it to the backward node that uses it last. What others
hold (the batch, parameters) does not count, nor does what no setting swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from offload._core import ActivationMeter
from offload.plan import Plan
from offload.plan.trace import Trace
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.executor import Measured, ScheduleExecutor, Stopwatch
from offload.runtime.schedule import Schedule


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations by node of a schedule.

    Attributes
    ----------
    unswapped
        With everything kept.
    kept
        Of those that the schedule keeps, and of dropped ones until forward needs them no more.
    planned
        As the plan has it; by hand nothing.
    """

    unswapped: tuple[int, ...]
    kept: tuple[int, ...]
    planned: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, plan: Plan) -> ActivationBytes:
        """Those of a step that follows a plan. What recomputation reads stays, or is back, until then."""
        planned_swaps = {swap.id: swap for swap in plan.swaps}
        # In forward nothing tells when a dropped tensor goes: it counts as kept until the plan's last use of it.
        in_forward, in_backward = _recomputed_spans(plan)
        kept, planned = list(in_forward), [*in_forward, *in_backward]
        for tensor in plan.recomputed_trace.tensors:
            span = (tensor.packed + 1, tensor.last_use, tensor.bytes)
            swap = planned_swaps.get(tensor.id)
            if swap is None:
                kept.append(span)
                planned.append(span)
            else:
                planned.append((tensor.packed + 1, swap.release - 1, tensor.bytes))
                planned.append((swap.prefetch, tensor.last_use, tensor.bytes))
        node_count = len(plan.trace.nodes)
        return cls(unswapped_activations(plan.trace), *(_by_node(node_count, spans) for spans in (kept, planned)))

    @classmethod
    def of_manual(cls, schedule: Schedule, held: Iterable[int] = ()) -> ActivationBytes:
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


def unswapped_activations(trace: Trace) -> tuple[int, ...]:
    """Bytes of activations by node with everything kept."""
    return _by_node(len(trace.nodes), ((x.packed + 1, x.last_use, x.bytes) for x in trace.tensors))


Spans = list[tuple[int, int, int]]


def _recomputed_spans(plan: Plan) -> tuple[Spans, Spans]:
    """Of the tensors that a plan recomputes: from pack to last use in forward; and from the time that they are back."""
    tensors = {tensor.id: tensor for tensor in plan.trace.tensors}
    last_uses = {row.id: tensors[row.id].last_use for row in plan.recomputes}
    for row in plan.recomputes:
        recipe = tensors[row.id].recompute
        assert recipe is not None
        for source in last_uses.keys() & set(recipe.inputs):
            last_uses[source] = max(last_uses[source], row.at)
    dropped = [(tensors[row.id], row.at) for row in plan.recomputes]
    in_forward = [(tensor.packed + 1, tensor.last_forward, tensor.bytes) for tensor, _ in dropped]
    return in_forward, [(at, last_uses[tensor.id], tensor.bytes) for tensor, at in dropped]


def _by_node(node_count: int, spans: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """Bytes by node, of spans (first node, last node, bytes)."""
    change = [0] * (node_count + 2)
    for first, last, nbytes in spans:
        if first <= last:
            change[first] += nbytes
            change[last + 1] -= nbytes
    return tuple(accumulate(change[:node_count]))


class MeteredExecutor(ScheduleExecutor):
    """One step that follows a schedule and measures its activation memory.

    Parameters
    ----------
    weights
        What the schedule keeps, by node.
    finds_held
        Whether to find the swapped storages that somebody else holds; a plan knows them already.

    Attributes
    ----------
    held
        Pack indices of swapped tensors that somebody else holds, so that swapping them freed nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        engine: Engine,
        counts: Counts,
        reason: str,
        deviate: Callable[[], None],
        stopwatch: Stopwatch,
        weights: ActivationBytes,
        *,
        finds_held: bool = False,
    ) -> None:
        # The engine's count does not tell one step's activations from another's.
        self._meter = ActivationMeter(weights.kept, engine.resident, counts.begun, engine.unswapped.now == 0)
        super().__init__(schedule, engine, counts, reason, deviate, stopwatch, self._meter)
        self.held: set[int] = set()
        self.copies.finds_held = finds_held
        self._measured = stopwatch.measured

    @property
    def missed(self) -> set[int]:
        """Pack indices of tensors that backward asked for before their copy-in was started."""
        return self.copies.missed

    @property
    def peak_bytes(self) -> int | None:
        """Most activation bytes in memory at a time; None where they were not measured."""
        return self._meter.peak_bytes if self._meter.is_on and self.on_schedule else None

    def measured(self, node_count: int) -> Measured | None:
        """What it took; None where it is not over."""
        return self._measured(node_count)

    def late_packs(self, measured: Measured, least_seconds: float) -> dict[int, float]:
        """Seconds waited, by first pack index, for tensors that were not there when backward needed them.

        Those are the ones whose prefetch had not begun, and those it waited for longer than `least_seconds`.
        """
        schedule, missed = self.schedule, self.missed
        waited = dict.fromkeys(missed, 0.0)
        for index, seconds in measured.waits.items():
            first = schedule.order.duplicates.get(index, index)
            if first in schedule.swapped:
                waited[first] = waited.get(first, 0.0) + seconds
        return {index: seconds for index, seconds in waited.items() if seconds > least_seconds or index in missed}

    def pass_by(self, pack_index: int) -> None:
        """A tensor is packed that the schedule keeps, where the cursor alone cannot advance the schedule."""
        super().pass_by(pack_index)
        self._meter_at(pack_index)

    def packed(self, pack_index: int) -> None:
        """The hook of this pack is about to return."""
        super().packed(pack_index)
        entry = self.schedule.order.entries.get(pack_index)
        if entry is not None and pack_index in self.schedule.swapped and self.copies.find(pack_index) is None:
            self._meter.stayed_bytes += entry.nbytes
        self._meter_at(pack_index)

    def unpacking(self, pack_index: int) -> None:
        """Backward asks for the tensor of this pack."""
        super().unpacking(pack_index)
        if self.copies.finds_held:
            self.held = self.copies.find_held()
        first = self.schedule.order.duplicates.get(pack_index, pack_index)
        slot = self.copies.find(first)
        is_missing = slot is not None and slot.record.is_swapped_out
        if is_missing:
            self.copies.miss(first)
        self._meter.weigh(self.cursor.node, slot.record.nbytes if slot is not None and is_missing else 0)

    def _meter_at(self, pack_index: int) -> None:
        self._meter.weigh(self.schedule.order.node_after_pack.get(pack_index, -1))
