"""Executes a schedule during a step: starts what is due and measures the durations of nodes and hooks.

C++ handles most packs and unpacks alone, with the copies that are due there. `hooks.py` reports the others to the
executor. If a node begins at a reported pack or unpack, the executor waits for the copy-outs and starts the copy-ins
that are due at this node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload._core import ActivationMeter, NodeClock, ScheduleCursor, StepCopies, SwappedStorage
from offload.runtime.counters import Counts
from offload.runtime.device_clock import DeviceClock
from offload.runtime.engine import Engine
from offload.runtime.recomputation import DroppedTensors, Recomputation
from offload.runtime.recomputed_storage import DroppedHandle
from offload.runtime.schedule import Schedule
from offload.runtime.weak import weak_callback
from offload.torch_compat.autograd import call_at_end_of_backward, current_node

_DUE, _UNWATCHED, _BACK = 1, 2, 3  # answers of `ScheduleCursor.ask`; after 0, nothing has to be done


class StepObserver(Protocol):
    """The object that the hooks of a step report to."""

    @property
    def cursor(self) -> ScheduleCursor | None:
        """Decides in C++ what the hooks of kept tensors do. If None, each of these hooks asks the observer."""

    @property
    def reason(self) -> str:
        """Why the schedule keeps tensors."""

    @property
    def copies(self) -> StepCopies | None:
        """If given, C++ swaps the tensors that the schedule swaps. If None, the hooks ask the observer about each."""

    @property
    def recomputation(self) -> Recomputation | None:
        """Drops tensors to be recomputed, or records how tensors can be recomputed; None if the step does neither."""

    def watches(self, pack_index: int) -> bool:
        """Return whether the hook of a kept tensor reports its unpack."""

    @property
    def caps_in_flight(self) -> bool:
        """Whether `Engine.in_flight_bytes_max` limits the bytes of tensors whose copy-out has not ended."""

    def begin(self) -> None:
        """Called when a hook begins that may wait."""

    def pass_by(self, pack_index: int) -> None:
        """Called at the pack of a kept tensor if a release or a prefetch is due at the node that begins after it.

        In a timed step on an accelerator, called at every pack of a tensor that the schedule keeps: if a node begins
        there, an event is recorded.
        """

    def reason_to_keep(self, pack_index: int, nbytes: int) -> str | None:
        """Return why this storage is kept; None if it is swapped or dropped."""

    def need(self, pack_index: int) -> int:
        """Return the spill priority: larger if backward needs the tensor later."""

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Called when the copy-out of a storage has been queued."""

    def duplicated(self, pack_index: int, slot: SwappedStorage | DroppedHandle) -> None:
        """Called when another view is saved of a storage that is already swapped or dropped."""

    def packed(self, pack_index: int) -> None:
        """Called when the hook of this pack is about to return."""

    def unpacking(self, pack_index: int) -> None:
        """Called when backward asks for the tensor of this pack."""

    def unpacked(self, pack_index: int) -> None:
        """Called when the tensor of this pack is on the device and the hook is about to return."""


class SwapOnDemand:
    """An observer without a schedule: every tensor is swapped out, and swapped in on demand."""

    caps_in_flight = True
    cursor = None
    copies: StepCopies | None = None
    reason = ""
    recomputation: Recomputation | None = None

    def watches(self, pack_index: int) -> bool:
        """Return False: hooks of kept tensors report no unpack."""
        return False

    def pass_by(self, pack_index: int) -> None: ...

    def reason_to_keep(self, pack_index: int, nbytes: int) -> str | None:
        """Return None: every tensor is swapped."""
        return None

    def need(self, pack_index: int) -> int:
        """Return a guess: tensors that are saved later are needed sooner."""
        return 2**32 - pack_index

    def begin(self) -> None: ...
    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None: ...
    def duplicated(self, pack_index: int, slot: SwappedStorage | DroppedHandle) -> None: ...
    def packed(self, pack_index: int) -> None: ...
    def unpacking(self, pack_index: int) -> None: ...
    def unpacked(self, pack_index: int) -> None: ...


@dataclass(frozen=True)
class Measured:
    """Measured durations of a step, in seconds; node starts are relative to the start of the step."""

    starts: tuple[float, ...]  # by node
    node_seconds: tuple[float, ...]  # by node, without `stall_seconds`
    waits: dict[int, float]  # by pack index: how long backward waited for the tensor
    stall_seconds: float  # elapsed time of the hooks that swap, prefetch, wait or recompute
    hook_seconds: float  # CPU time of these hooks; zero on a CUDA device
    step_seconds: float
    thread_seconds: float | None = None  # CPU time of the step's thread, hooks included; None if several threads ran it


class Stopwatch:
    """Measures when nodes begin and how long hooks delay them.

    Attributes
    ----------
    clock
        Takes the measurements.
    begin, pass_by, arrive, end
        Methods of `clock`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._end: Any = None
        self._defers_copy_outs = False
        self._begun = threading.get_ident(), time.thread_time()
        self._thread_seconds: float | None = None
        self.clock = DeviceClock(engine) if engine.is_accelerator else NodeClock()
        self.begin = self.clock.begin
        self.pass_by = self.clock.pass_by
        self.arrive = self.clock.arrive
        self.end = self.clock.end

    def defer_copy_outs(self) -> None:
        """Defer copy-outs until the step waits for one or its backward has ended."""
        self._defers_copy_outs = True
        self._engine.store.defer_copy_outs(True)

    def end_deferral(self) -> None:
        """Copy tensors out in the background again."""
        if self._defers_copy_outs:
            self._defers_copy_outs = False
            self._engine.store.defer_copy_outs(False)

    def listen_for_the_end(self) -> None:
        """Record the end of the backward pass, if one is running."""
        if not self.clock.is_listening and current_node() is not None:
            self.clock.is_listening = True
            # A weak callback: a thread of torch may hold the callback for a moment after backward has returned.
            call_at_end_of_backward(weak_callback(self._finish))

    def _finish(self) -> None:
        self._end = self._engine.mark()
        self.end_deferral()
        thread, before = self._begun
        self._thread_seconds = time.thread_time() - before if threading.get_ident() == thread else None

    @property
    def finished(self) -> bool:
        """Whether backward has ended."""
        return self._end is not None

    def measured(self, node_count: int) -> Measured | None:
        """Return the durations of `node_count` nodes, 0 s if one did not run; None if the step has not ended."""
        if self._end is None:
            return None
        found = self.clock.measure(self._end, node_count)
        if found is None:
            return None
        starts, node_seconds, waits, stall_seconds, step_seconds = found
        hooks = self.clock.hook_seconds
        return Measured(starts, node_seconds, waits, stall_seconds, hooks, step_seconds, self._thread_seconds)


class ScheduleExecutor:
    """One step that follows a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        engine: Engine,
        counts: Counts,
        reason: str,
        deviate: Callable[[], None],
        stopwatch: Stopwatch | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        self.schedule = schedule
        self.stopwatch = stopwatch
        self.reason = reason
        clock = stopwatch.clock if stopwatch is not None else None
        self._device_clock = clock if isinstance(clock, DeviceClock) else None
        self.cursor = ScheduleCursor(schedule.table, None if isinstance(clock, DeviceClock) else clock, meter)
        if self._device_clock is not None:
            self.cursor.decides = False
        self._engine = engine
        self._counts = counts
        self._deviate = deviate
        self.on_schedule = True
        self._watched = schedule.watched
        self._swapped_bytes = schedule.swapped_bytes
        self.recomputation = DroppedTensors(schedule, engine, self._recomputed) if schedule.windows else None
        self.recompute_seconds = 0.0  # of this step
        self._node_after_pack = schedule.order.node_after_pack if schedule.plan is not None else {}
        self.copies = StepCopies(self.cursor, counts.prefetches, counts.prefetches_left)
        if schedule.plan is None:
            self.copies.caps_in_flight = True
        # Whether the current hook swaps, waits, starts a copy or recomputes. If not, its time counts as computation.
        self._acted = False

    @property
    def caps_in_flight(self) -> bool:
        """False while the step follows a plan: the plan's releases limit the copy-outs in flight."""
        return self.schedule.plan is None or not self.on_schedule

    def watches(self, pack_index: int) -> bool:
        """Return whether the unpack of a kept tensor advances the schedule."""
        return self.cursor.watches(pack_index)

    def begin(self) -> None:
        """Start the time of a hook that may wait."""
        if self.stopwatch is not None:
            self.stopwatch.begin()

    def pass_by(self, pack_index: int) -> None:
        """Begin the node after the pack of a kept tensor: do what is due there, or record its start."""
        node = self._node_after_pack.get(pack_index)
        if node is None:
            return
        if node >= self.cursor.next_due:
            self.begin()
            self.packed(pack_index)
        else:
            if self.stopwatch is not None:
                self.stopwatch.pass_by(node)
            self.cursor.node = node

    def reason_to_keep(self, pack_index: int, nbytes: int) -> str | None:
        """Return why this storage is kept; None if it is swapped or dropped."""
        if not self.on_schedule:
            return None
        entry = self._swapped_bytes.get(pack_index)
        if entry is not None and entry[0] == nbytes:
            return None
        schedule = self.schedule
        if pack_index in schedule.order.duplicates:
            return self.reason
        if not schedule.matches(pack_index, nbytes):
            self._leave_schedule()  # another branch than the recorded one: continue on demand
            return None
        return None if pack_index in schedule.swapped or pack_index in schedule.recomputed else self.reason

    def need(self, pack_index: int) -> int:
        """Return the spill priority: larger if backward needs the tensor later."""
        entry = self._swapped_bytes.get(pack_index)
        return entry[1] if entry is not None else self.schedule.need(pack_index)

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Register a storage whose copy-out has been queued, so that it is released and prefetched as scheduled."""
        self.copies.add(pack_index, slot, tensor.untyped_storage())

    def duplicated(self, pack_index: int, slot: SwappedStorage | DroppedHandle) -> None:
        """Do nothing: the storage of this view is already swapped or dropped."""

    def packed(self, pack_index: int) -> None:
        """Do what is due at the node that begins when the hook of this pack returns."""
        self._acted = pack_index in self._swapped_bytes
        if self.on_schedule:
            node = self._node_after_pack.get(pack_index)
            if node is not None:
                self._arrive(node)
        if self._acted and self.stopwatch is not None:
            self.stopwatch.end(None)

    def unpacking(self, pack_index: int) -> None:
        """Do what is due at the node that begins when backward asks for the tensor of this pack."""
        if self.stopwatch is not None:
            self.stopwatch.begin()
            if not self.stopwatch.clock.is_listening:
                self.stopwatch.listen_for_the_end()
        # Every view of a swapped storage may wait for the storage, so a duplicate counts as a swapped tensor.
        first = self.schedule.order.duplicates.get(pack_index, pack_index)
        self._acted = first in self._swapped_bytes or first in self.schedule.recomputed
        if not self.on_schedule:
            return
        cursor, clock = self.cursor, self._device_clock
        before = cursor.node if clock is not None else 0
        asked = cursor.ask(pack_index)
        if asked == _BACK:
            self._start_over(self._watched[pack_index], pack_index)
            asked = cursor.ask(pack_index)
        if asked == _UNWATCHED:
            if self._acted:  # the recorded backward ran a part of the graph only, and did not use this tensor
                self._deviate()
            return
        if clock is not None and cursor.node > before:
            clock.arrive(cursor.node)
        if asked == _DUE:
            self._act(cursor.node)

    def unpacked(self, pack_index: int) -> None:
        """End the time of the hook: the tensor of this pack is on the device."""
        if self._acted and self.stopwatch is not None:
            self.stopwatch.end(pack_index)

    def _recomputed(self, nbytes: int, seconds: float) -> None:
        """Count a dropped tensor that was recomputed."""
        self.recompute_seconds += seconds
        self._counts.recompute_seconds += seconds
        self._counts.recomputed.tensors += 1
        self._counts.recomputed.nbytes += nbytes

    def _arrive(self, node: int) -> None:
        if self._device_clock is not None and node > self.cursor.node:
            self._device_clock.arrive(node)
        if self.cursor.arrive(node):
            self._act(node)

    def _act(self, node: int) -> None:
        """Do what is due at a node."""
        self._acted = True
        self.copies.act(node)

    def _start_over(self, node: int, pack_index: int) -> None:
        """Go back to an earlier node: for a second backward over a retained graph, or a backward in another order."""
        if not self.cursor.has_used(pack_index):
            self._deviate()
        self.cursor.forget_uses()
        self.cursor.node = node
        self.copies.rewind(node)

    def _leave_schedule(self) -> None:
        self.on_schedule = self.cursor.is_on_schedule = False
        self._watched = {}
        if self.recomputation is not None:
            self.recomputation.abandon()
        self._deviate()
