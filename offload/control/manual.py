"""The manual mode: records the first step of a signature; later steps swap as `n_tensors` and `lb` require.

A session calls the controller at the beginning of every step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from offload.control.limits import LIMITS, Limits
from offload.options import Options
from offload.profiling.profiler import Recorder
from offload.runtime.activations import ActivationBytes, MeteredExecutor
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.executor import ScheduleExecutor, StepObserver, Stopwatch
from offload.runtime.schedule import Schedule, StepOrder, manual_schedule
from offload.runtime.weak import weak_callback

__all__ = ["ManualController", "ManualStep"]


@dataclass
class ManualStep:
    """One signature: its schedule, and the measurements of its steps.

    Attributes
    ----------
    limits
        Tolerances, and how many measurements are kept.
    schedule, weights
        The schedule that its steps follow, and its bytes of activations by node.
    steps
        Number of steps that followed it.
    executors
        Executors of steps whose measurements have not been read yet.
    step_seconds, compute_seconds, activation_bytes
        Measurements of the last steps: duration of the step, duration of its computation, most bytes of activations in
        memory.
    late
        Seconds that the last measured step waited for a tensor, by pack index.
    held
        Pack indices of swapped tensors that other code held in the last measured step, so that swapping them freed
        nothing.
    """

    limits: Limits
    schedule: Schedule
    weights: ActivationBytes
    steps: int = 0
    executors: deque[MeteredExecutor] = field(default_factory=lambda: deque(maxlen=4))
    step_seconds: deque[float] = field(init=False)
    compute_seconds: deque[float] = field(init=False)
    activation_bytes: deque[int] = field(init=False)
    late: dict[int, float] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.step_seconds = deque(maxlen=self.limits.measurements)
        self.compute_seconds = deque(maxlen=self.limits.measurements)
        self.activation_bytes = deque(maxlen=self.limits.measurements)

    def read_measurements(self, counts: Counts) -> None:
        """Read the measurements of the last steps that the device has finished, and count them."""
        unread = []
        for executor in self.executors:
            measured = executor.measured(self.schedule.order.node_count)
            if measured is None:
                unread.append(executor)
                continue
            if executor.is_disturbed:
                counts.unmeasured_steps += 1
                continue
            self.step_seconds.append(measured.step_seconds)
            self.compute_seconds.append(sum(measured.node_seconds))
            if executor.peak_bytes is not None:
                self.activation_bytes.append(executor.peak_bytes)
            self.late = executor.late_packs(measured, self.limits.late_seconds)
            counts.prefetched_late += len(self.late.keys() - executor.missed)
            if executor.held != self.held:
                self.held = executor.held
                self.weights = ActivationBytes.of_manual(self.schedule, executor.held)
        self.executors.clear()
        self.executors.extend(unread)


class ManualController:
    """Swaps `n_tensors` storages and prefetches each `lookahead_nodes` backward nodes ahead.

    Parameters
    ----------
    on_recorded
        Called with every step that has been recorded.
    limits
        Bounds and tolerances.
    """

    def __init__(
        self,
        options: Options,
        engine: Engine,
        counts: Counts,
        on_recorded: Callable[[StepOrder], None],
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._options = options
        self._engine = engine
        self._counts = counts
        self._on_recorded = on_recorded
        # A weak callback: the controller keeps the last executors, which must not keep the store of a session alive.
        self._forget = weak_callback(self.forget)
        self._recorders: OrderedDict[object, Recorder] = OrderedDict()
        self.schedules: OrderedDict[object, ManualStep] = OrderedDict()

    def observer(self, signature: object, model: nn.Module) -> StepObserver:
        """Return a recorder for a signature's first step, and an executor of its schedule for later ones."""
        recorder = self._recorders.get(signature)
        if recorder is not None and recorder.finished:
            del self._recorders[signature]
            self._on_recorded(recorder.order)
            count, lookahead_nodes = self._options.n_tensors, self._options.lookahead_nodes
            assert count is not None
            assert lookahead_nodes is not None
            schedule = manual_schedule(recorder.order, count, lookahead_nodes)
            self.schedules[signature] = ManualStep(self._limits, schedule, ActivationBytes.of_manual(schedule))
        step = self.schedules.get(signature)
        for table in (self.schedules, self._recorders):
            while len(table) > self._limits.signatures:
                table.popitem(last=False)
        if step is None:
            recorder = self._recorders[signature] = Recorder()
            return recorder
        self.schedules.move_to_end(signature)
        step.read_measurements(self._counts)
        step.steps += 1
        about = (step.schedule, self._engine, self._counts, "n_tensors", partial(self._forget, signature))
        if step.steps > self._limits.manual_measured_steps and step.steps % self._limits.recheck_steps:
            self._counts.unmeasured_steps += 1
            return ScheduleExecutor(*about)
        executor = MeteredExecutor(*about, Stopwatch(self._engine), step.weights, finds_held=True)
        step.executors.append(executor)
        return executor

    def needs_hooks(self, signature: object) -> bool:
        """Return True, because hooks also count the tensors that stay."""
        return True

    def read_measurements(self) -> None:
        """Read every measurement that is complete."""
        for step in self.schedules.values():
            step.read_measurements(self._counts)

    @property
    def main(self) -> ManualStep | None:
        """The signature with the most steps. If several have the same number, the one used last."""
        return max(reversed(self.schedules.values()), key=lambda each: each.steps, default=None)

    def forget(self, signature: object) -> None:
        """Record this signature again at its next step."""
        self.schedules.pop(signature, None)

    def end_finished_profiles(self) -> None:
        """Do nothing: recording needs only the hooks."""

    def end_profiles(self) -> None:
        """Do nothing: recording needs only the hooks."""
