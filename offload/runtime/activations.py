"""Bytes of activations in memory while a step runs, with its schedule and without swapping.

A `MeteredExecutor` measures them at every hook. Activations are saved tensors that can be swapped. Each counts from the
hook that saves it to the last backward node that uses it. Tensors that other code holds (the batch, parameters) do not
count, nor do tensors that are never swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from offload._core import ActivationMeter, NodeBytes
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
        Bytes if every tensor is kept.
    kept
        Bytes of the tensors that the schedule keeps, and of dropped ones up to their last use in forward.
    planned
        Bytes as predicted by the plan; empty in the manual mode.
    """

    unswapped: tuple[int, ...]
    kept: tuple[int, ...]
    planned: tuple[int, ...] = ()

    @cached_property
    def metered(self) -> NodeBytes:
        """`kept`, as the meter reads it."""
        return NodeBytes(self.kept)

    @classmethod
    def of_plan(cls, plan: Plan) -> ActivationBytes:
        """Return the bytes of a step that follows a plan. Sources of a recipe are resident until it has read them."""
        planned_swaps = {swap.id: swap for swap in plan.swaps}
        # The meter cannot see when forward frees a dropped tensor: it counts as kept until its last use in the plan.
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
        """Return the bytes of a manual schedule. `held` are pack indices of tensors that other code holds too."""
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
    """Return the bytes of activations by node if every tensor is kept."""
    return _by_node(len(trace.nodes), ((x.packed + 1, x.last_use, x.bytes) for x in trace.tensors))


Spans = list[tuple[int, int, int]]


def _recomputed_spans(plan: Plan) -> tuple[Spans, Spans]:
    """Return the spans of recomputed tensors: in forward until the last use, in backward from the recomputation on."""
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
    """Return the bytes by node of spans (first node, last node, bytes)."""
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
        Bytes of activations that the schedule keeps, by node.
    finds_held
        Whether to find the swapped storages that other code holds too; a plan knows them already.

    Attributes
    ----------
    held
        Pack indices of swapped tensors that other code holds too, so that swapping them freed nothing.
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
        # The engine's gauges do not separate two steps, so the meter is on only if no activations exist at the start.
        self._meter = ActivationMeter(weights.metered, engine.resident, counts.begun, engine.unswapped.now == 0)
        super().__init__(schedule, engine, counts, reason, deviate, stopwatch, self._meter)
        self.held: set[int] = set()
        self.copies.finds_held = finds_held
        self._stopwatch = stopwatch

    @property
    def is_disturbed(self) -> bool:
        """Whether other work of offload ran during this step, so that its times are not those of the step."""
        return self._stopwatch.is_disturbed

    @property
    def missed(self) -> set[int]:
        """Pack indices of tensors that backward asked for before their copy-in was started."""
        return self.copies.missed

    @property
    def peak_bytes(self) -> int | None:
        """Most activation bytes in memory at a time; None if they were not measured."""
        return self._meter.peak_bytes if self._meter.is_on and self.on_schedule else None

    def measured(self, node_count: int) -> Measured | None:
        """Return the measured durations of the step; None if it is not over."""
        return self._stopwatch.measured(node_count)

    def late_packs(self, measured: Measured, least_seconds: float) -> dict[int, float]:
        """Return the seconds that backward waited for late tensors, by first pack index.

        A tensor is late if its prefetch had not begun, or if backward waited longer than `least_seconds` for it.
        """
        schedule, missed = self.schedule, self.missed
        waited = dict.fromkeys(missed, 0.0)
        for index, seconds in measured.waits.items():
            first = schedule.order.duplicates.get(index, index)
            if first in schedule.swapped:
                waited[first] = waited.get(first, 0.0) + seconds
        return {index: seconds for index, seconds in waited.items() if seconds > least_seconds or index in missed}

    def pass_by(self, pack_index: int) -> None:
        """Begin the node after the pack of a kept tensor, and measure there."""
        super().pass_by(pack_index)
        self._meter_at(pack_index)

    def packed(self, pack_index: int) -> None:
        """Do what is due at the node that begins when the hook of this pack returns, and measure there."""
        super().packed(pack_index)
        entry = self.schedule.order.entries.get(pack_index)
        if entry is not None and pack_index in self.schedule.swapped and self.copies.find(pack_index) is None:
            self._meter.stayed_bytes += entry.nbytes
        self._meter_at(pack_index)

    def unpacking(self, pack_index: int) -> None:
        """Do what is due when backward asks for the tensor of this pack, and measure there."""
        super().unpacking(pack_index)
        if self.copies.finds_held:
            self.held = self.copies.find_held()
        first = self.schedule.order.duplicates.get(pack_index, pack_index)
        slot = self.copies.find(first)
        is_missing = slot is not None and slot.is_swapped_out
        if is_missing:
            self.copies.miss(first)
        self._meter.weigh(self.cursor.node, slot.nbytes if slot is not None and is_missing else 0)

    def _meter_at(self, pack_index: int) -> None:
        self._meter.weigh(self.schedule.order.node_after_pack.get(pack_index, -1))
