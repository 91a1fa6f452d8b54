"""Follows a schedule during a step: waits for copy-outs, starts copy-ins, and measures how long nodes and hooks take.

A step is divided into nodes; each but the first begins at a pack or an unpack. A schedule lists the releases (waits
for a copy-out) and the prefetches of each node. Packs are numbered from 0; this number is the tensor's pack index.

C++ handles most packs and unpacks without Python, including the copies that are due there. `hooks.py` reports the other
packs and unpacks to the executor. If a node begins at one of them, the executor runs the releases and prefetches of
this node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload._core import ActivationMeter, DeviceClock, ScheduleCursor, StepCopies, SwappedStorage
from offload.runtime.counters import Counts
from offload.runtime.disturbance import disturbances
from offload.runtime.engine import Engine
from offload.runtime.recomputation import DroppedTensors, Recomputation
from offload.runtime.recomputed_storage import RecomputedStorage
from offload.runtime.schedule import Schedule
from offload.runtime.weak import weak_callback
from offload.torch_compat.autograd import call_at_end_of_backward
from offload.torch_compat.backward_pass import current_node

# Results of `ScheduleCursor.ask`; 0: nothing is due.
_DUE = 1  # a release or a prefetch is due
_UNWATCHED = 2  # the unpack is not in the schedule
_BACK = 3  # the unpack begins an earlier node than the current one


class StepObserver(Protocol):
    """The object that the hooks of a step report to."""

    @property
    def cursor(self) -> ScheduleCursor | None:
        """The step's position in its schedule. C++ reads and advances it at packs and unpacks.

        None if the step follows no schedule. Then C++ calls `watches` for each kept tensor.
        """

    @property
    def reason(self) -> str:
        """The reason that the report gives for tensors that the schedule keeps on the device."""

    @property
    def copies(self) -> StepCopies | None:
        """The copies of a step that follows a schedule; None without a schedule.

        If it is not None, C++ swaps most of the tensors that the schedule swaps; `StepHooks` describes the exceptions.
        For tensors that Python swaps, the hooks call the methods of `StepObserver`.
        """

    @property
    def recomputation(self) -> Recomputation | None:
        """Drops tensors to recompute in backward, or records how to recompute them; None if the step does neither."""

    def watches(self, pack_index: int) -> bool:
        """Return whether the unpack of this kept tensor is reported to the observer."""

    @property
    def caps_in_flight(self) -> bool:
        """Whether `Engine.in_flight_bytes_max` limits the bytes of tensors whose copy-out has not ended."""

    def begin(self) -> None:
        """Called at the start of a pack hook in Python that may wait or start a copy."""

    def pass_by(self, pack_index: int) -> None:
        """Called at the pack of a kept tensor if a node with a release or a prefetch may begin after this pack."""

    def reason_to_keep(self, pack_index: int, nbytes: int) -> str | None:
        """Return why this storage is kept; None if it is swapped, or dropped and recomputed in backward."""

    def need(self, pack_index: int) -> int:
        """Return the spill priority: larger if backward needs the tensor later.

        When pinned memory is full, tensors with a larger spill priority are moved to the spill file first.
        """

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Called when the copy-out of a storage has been queued."""

    def duplicated(self, pack_index: int, slot: SwappedStorage | RecomputedStorage) -> None:
        """Called when autograd saves another view of a storage that is already swapped or dropped."""

    def packed(self, pack_index: int) -> None:
        """Called at the end of a pack hook that called `begin`, and after a copy-out that C++ could not start."""

    def unpacking(self, pack_index: int) -> None:
        """Called when backward asks for the tensor of this pack."""

    def unpacked(self, pack_index: int) -> None:
        """Called at the end of the unpack hook, when the tensor of this pack is on the device."""


class SwapOnDemand:
    """An observer without a schedule: every tensor is swapped out, and swapped in on demand."""

    caps_in_flight = True
    cursor = None
    copies: StepCopies | None = None
    reason = ""
    recomputation: Recomputation | None = None

    def watches(self, pack_index: int) -> bool:
        """Return False: unpacks of kept tensors are not reported."""
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
    def duplicated(self, pack_index: int, slot: SwappedStorage | RecomputedStorage) -> None: ...
    def packed(self, pack_index: int) -> None: ...
    def unpacking(self, pack_index: int) -> None: ...
    def unpacked(self, pack_index: int) -> None: ...


@dataclass(frozen=True)
class Measured:
    """Measured durations of a step, in seconds; node starts are relative to the start of the step."""

    starts: tuple[float, ...]  # by node
    node_seconds: tuple[float, ...]  # by node, without its part of `stall_seconds`
    waits: dict[int, float]  # by pack index: how long backward waited for the tensor
    stall_seconds: float  # elapsed time of the hooks that swap, prefetch, wait or recompute
    hook_seconds: float  # CPU time of these hooks; zero on an accelerator
    step_seconds: float
    # CPU time of the step's thread, with hooks; None on an accelerator, or if backward ended in another thread
    thread_seconds: float | None = None


class Stopwatch:
    """Measures when nodes begin and how long hooks delay them.

    Attributes
    ----------
    clock
        Takes the measurements.
    is_disturbed
        Whether backward has ended, and `disturb` was called during the step.
    begin, pass_by, arrive, end
        Methods of `clock`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.finished = False  # whether backward has ended
        self.is_disturbed = False
        self._disturbances = disturbances()
        self._defers_copy_outs = False
        self._begun = threading.get_ident(), time.thread_time()
        self._thread_seconds: float | None = None
        self.clock = engine.start_clock()
        self.begin = self.clock.begin
        self.pass_by = self.clock.pass_by
        self.arrive = self.clock.arrive
        self.end = self.clock.end

    def defer_copy_outs(self) -> None:
        """Queue copy-outs without starting them, until backward has ended or the next step begins.

        Whenever the step waits for one of them, all that are queued by then start. Without effect on an accelerator.
        """
        self._defers_copy_outs = True
        self._engine.store.defer_copy_outs(True)

    def end_deferral(self) -> None:
        """Start the deferred copy-outs; later ones run in the background at once, as usual."""
        if self._defers_copy_outs:
            self._defers_copy_outs = False
            self._engine.store.defer_copy_outs(False)

    def listen_for_the_end(self) -> None:
        """In a backward pass, register a callback that records the time when the pass ends, unless this was done."""
        if not self.clock.is_listening and current_node() is not None:
            self.clock.is_listening = True
            self._follow_stream()
            # The callback holds this object weakly: a thread of torch may keep the callback for a while after backward.
            call_at_end_of_backward(weak_callback(self._finish))

    def _follow_stream(self) -> None:
        if isinstance(self.clock, DeviceClock):
            self.clock.move_to(self._engine.current_stream())

    def _finish(self) -> None:
        self.clock.is_listening = False  # another backward pass may follow
        self._follow_stream()
        ends = self.clock.finish()
        self.finished = True
        self.end_deferral()
        if not ends:
            return
        self.is_disturbed = disturbances() != self._disturbances
        thread, before = self._begun
        is_known = not self._engine.is_accelerator and threading.get_ident() == thread
        self._thread_seconds = time.thread_time() - before if is_known else None

    def measured(self, node_count: int) -> Measured | None:
        """Return the durations of `node_count` nodes (0 s if a node did not begin); None if the step has not ended."""
        found = self.clock.measure(node_count)
        if found is None:
            return None
        starts, node_seconds, waits, stall_seconds, step_seconds = found
        hooks = self.clock.hook_seconds
        return Measured(starts, node_seconds, waits, stall_seconds, hooks, step_seconds, self._thread_seconds)


class ScheduleExecutor:
    """The observer of one step that follows a schedule."""

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
        self.cursor = ScheduleCursor(schedule.table, stopwatch.clock if stopwatch is not None else None, meter)
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
        self._leaving: Callable[[], None] | None = None

    def call_at(
        self, nodes: Sequence[tuple[int, bool]], reach: Callable[[int], None], leave: Callable[[], None]
    ) -> None:
        """Call `reach` when the step reaches each of these nodes, with the node's place in `nodes`.

        Each node has a flag: whether the call comes after the node's prefetches. `leave` is called if the step
        deviates from the schedule in forward, or if backward continues at an earlier node.
        """
        self.copies.call_at(nodes, reach)
        self._leaving = leave

    @property
    def caps_in_flight(self) -> bool:
        """False while the step follows a plan: then the waits at release nodes limit the copy-outs in flight."""
        return self.schedule.plan is None or not self.on_schedule

    def watches(self, pack_index: int) -> bool:
        """Return whether the unpack of this kept tensor begins a node of the schedule (`Schedule.watched`)."""
        return self.cursor.watches(pack_index)

    def begin(self) -> None:
        """Start timing a hook that may wait or start a copy."""
        if self.stopwatch is not None:
            self.stopwatch.begin()

    def pass_by(self, pack_index: int) -> None:
        """Begin the node after the pack of a kept tensor: run its releases and prefetches, or only record its start."""
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
            self._leave_schedule()  # the step differs from the recorded one: from here on it swaps on demand
            return None
        return None if pack_index in schedule.swapped or pack_index in schedule.recomputed else self.reason

    def need(self, pack_index: int) -> int:
        """Return the spill priority: larger if backward needs the tensor later."""
        entry = self._swapped_bytes.get(pack_index)
        return entry[1] if entry is not None else self.schedule.need(pack_index)

    def swapped(self, pack_index: int, slot: SwappedStorage, tensor: torch.Tensor) -> None:
        """Register a storage whose copy-out has been queued. The schedule then releases and prefetches it."""
        self.copies.add(pack_index, slot, tensor.untyped_storage())

    def duplicated(self, pack_index: int, slot: SwappedStorage | RecomputedStorage) -> None:
        """Do nothing: the storage of this view is already swapped or dropped."""

    def packed(self, pack_index: int) -> None:
        """Run the releases and prefetches of the node that begins when this pack hook returns, if one begins."""
        self._acted = pack_index in self._swapped_bytes
        if self.on_schedule:
            node = self._node_after_pack.get(pack_index)
            if node is not None:
                self._arrive(node)
        if self._acted and self.stopwatch is not None:
            self.stopwatch.end(None)

    def unpacking(self, pack_index: int) -> None:
        """Run the releases and prefetches of the node that begins at the unpack of this tensor, if one begins."""
        if self.stopwatch is not None:
            self.stopwatch.begin()
            if not self.stopwatch.clock.is_listening:
                self.stopwatch.listen_for_the_end()
        # If a storage is swapped or dropped, the unpack of each of its views may have to wait for the copy-in or to
        # recompute it. So `_acted` is True for each of these views, not only for the one that was packed first.
        first = self.schedule.order.duplicates.get(pack_index, pack_index)
        self._acted = first in self._swapped_bytes or first in self.schedule.recomputed
        if not self.on_schedule:
            return
        cursor = self.cursor
        asked = cursor.ask(pack_index)
        if asked == _BACK:
            self._start_over(self._watched[pack_index], pack_index)
            asked = cursor.ask(pack_index)
        if asked == _UNWATCHED:
            if self._acted:  # this tensor was not used in the recorded backward, which ran only a part of the graph
                self._deviate()
            return
        if asked == _DUE:
            self._act(cursor.node)

    def unpacked(self, pack_index: int) -> None:
        """Stop timing the hook: the tensor of this pack is on the device."""
        if self._acted and self.stopwatch is not None:
            self.stopwatch.end(pack_index)

    def _recomputed(self, nbytes: int, seconds: float) -> None:
        """Count a dropped tensor that was recomputed."""
        self.recompute_seconds += seconds
        self._counts.recompute_seconds += seconds
        self._counts.recomputed.tensors += 1
        self._counts.recomputed.nbytes += nbytes

    def _arrive(self, node: int) -> None:
        if self.cursor.arrive(node):
            self._act(node)

    def _act(self, node: int) -> None:
        """Run the releases, prefetches and calls that are due at a node."""
        self._acted = True
        self.copies.act(node)

    def _start_over(self, node: int, pack_index: int) -> None:
        """Go back to an earlier node: for a second backward over a retained graph, or a backward in another order."""
        if not self.cursor.has_used(pack_index):
            self._deviate()
        if self._leaving is not None:
            self._leaving()
        self.cursor.forget_uses()
        self.cursor.node = node
        self.copies.rewind(node)

    def _leave_schedule(self) -> None:
        self.on_schedule = self.cursor.is_on_schedule = False
        self._watched = {}
        if self.recomputation is not None:
            self.recomputation.abandon()
        if self._leaving is not None:
            self._leaving()
        self._deviate()
