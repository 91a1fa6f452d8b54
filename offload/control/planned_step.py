"""The profile, the plan and the measured steps of one signature (the shapes and kinds of a step's inputs).

`PlannedStep` holds these data. The controller decides what to do with them.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from offload.control.limits import Limits
from offload.control.plan_search import PlanSearch
from offload.control.step_cost import StepCost, without_slowing
from offload.control.trial import Recipes, TrialObserver, recipes_of
from offload.plan import InfeasibleLimitError, Link, Plan, StateOverlap, make_plan
from offload.plan.late import with_earlier_prefetches
from offload.plan.trace import Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile
from offload.runtime.activations import ActivationBytes, MeteredExecutor
from offload.runtime.counters import Counts, StepRecord
from offload.runtime.executor import Measured
from offload.runtime.schedule import Schedule, planned_schedule, serial_schedule
from offload.units import format_seconds

__all__ = ["KnownOverlap", "PlannedStep"]

log = logging.getLogger("offload")
node_log = logging.getLogger("offload.nodes")  # logs predicted and measured start of each node in a measured step


class KnownOverlap(NamedTuple):
    """An overlap, with what it was made for: a plan, and `StateMovers.kinds`."""

    plan: Plan
    kinds: tuple[object, ...]
    overlap: StateOverlap | None


@dataclass
class PlannedStep:
    """A signature whose step has been profiled.

    Attributes
    ----------
    limits
        Tolerances, and how many measurements are kept.
    profile
        The recorded step. After a trial step, the duration of each node is the shorter one of the two steps.
    link
        The speed of copies that plans assume, from a calibration or from the engine's own copies.
    held, plan_held
        Bytes of model, gradients and optimizers before a step: the largest figures so far (`HeldBytes.raised_to`), and
        those for which the present plan was made. They differ if a limit was refused, or if an earlier plan is followed
        again.
    plans_held
        The plans followed since the search last began, each with the bytes for which it was made.
    plan, schedule
        The plan and the schedule that the steps follow; None until the first plan is made.
    reference
        The schedule of the plan's reference steps, which keep every tensor or are serial; None before the first.
    signature
        The signature of the step: a `Signature`, or another hashable object in tests.
    incomplete_profiles
        Number of consecutive profiles, this one included, that lack the bytes of temporaries or include time and memory
        of other sessions' work (`Stopwatch.is_disturbed`); 0 if this one is complete.
    steps, plan_steps, replans
        `steps`: steps since the first plan. `plan_steps`: steps that have followed the present plan since its
        measurement began, except reference steps and steps that were not measured because of `is_behind`. `replans`:
        plans made because of measured steps since the search last began.
    search
        The search for a plan that keeps `max_slowdown`.
    executors
        Executors of steps whose measurements have not been read yet.
    node_seconds, step_seconds, swap_seconds, recompute_seconds
        Durations in the last measured steps: of each node, without what copies are assumed to add; of the step; of
        hooks per swapped or recomputed tensor; of recomputation.
    recompute_factors
        By tensor id: duration of recomputation in measured steps, divided by its duration in the trial step. Measured
        for all tensors of a plan together, so it is the same for all of them.
    costs
        The plan's last measured steps without its first one, to be compared with reference steps.
    starts
        When each node of the last measured step began, in seconds after the first node.
    late
        By tensor id: seconds for which the last measured step waited for a swapped tensor, if over `late_seconds`.
    late_tensors
        How many tensors the last measured step waited for, or needed before their prefetch had begun.
    weights
        Three numbers of bytes for each node: the activations without swapping, the tensors that the plan keeps, and the
        activations that the plan predicts to be in memory (`ActivationBytes`).
    activation_bytes
        Peak bytes of activations in each of the last measured steps.
    known
        The profile before `take_over` has changed it; None if the plan is newer.
    refusal
        The error that no plan stays within the memory limit; None if a plan does.
    trial
        The observer of the trial step that is in progress; None if there is none.
    recipes
        How tensors can be recomputed, as the trial step found; None before its end.
    optimizers
        Number of optimizers that had made an update at the last plan or the last call of `StatePlanner.is_outdated`. If
        it grows, the plan may lack optimizer state.
    trial_bytes
        Memory limit in bytes of a trial step that an `on_profile` listener has requested; None after it, or without.
    is_keeping_refused
        Whether a reference step that keeps every tensor failed, or had not ended when the next was due: none follows.
    overlap
        The result of `StatePlanner.overlap` for the present plan; None before it is needed.
    is_unjudged
        Whether measurements have been read since the plan was last compared with them: reports read them too.
    """

    limits: Limits
    profile: Profile
    link: Link
    held: HeldBytes
    signature: object = None
    incomplete_profiles: int = 0
    plan_held: HeldBytes = field(init=False)
    plans_held: list[tuple[Plan, HeldBytes]] = field(default_factory=list)
    plan: Plan | None = None
    schedule: Schedule | None = None
    reference: Schedule | None = None
    steps: int = 0
    plan_steps: int = 0
    search: PlanSearch = field(init=False)
    replans: int = 0
    executors: deque[MeteredExecutor] = field(default_factory=lambda: deque(maxlen=4))
    node_seconds: deque[tuple[float, ...]] = field(init=False)
    step_seconds: deque[float] = field(init=False)
    costs: deque[StepCost] = field(init=False)
    swap_seconds: deque[float] = field(init=False)
    recompute_seconds: deque[float] = field(init=False)
    activation_bytes: deque[int] = field(init=False)
    recompute_factors: dict[int, float] = field(default_factory=dict)
    starts: tuple[float, ...] = ()
    late: dict[int, float] = field(default_factory=dict)
    late_tensors: int = 0
    weights: ActivationBytes | None = None
    known: Profile | None = None
    refusal: InfeasibleLimitError | None = None
    trial: TrialObserver | None = None
    recipes: Recipes | None = None
    optimizers: int = 0
    trial_bytes: int | None = None
    is_keeping_refused: bool = False
    overlap: KnownOverlap | None = None
    is_unjudged: bool = False

    def __post_init__(self) -> None:
        self.plan_held = self.held
        self.search = PlanSearch(self.limits)
        self.node_seconds = deque(maxlen=self.limits.measurements)
        self.step_seconds = deque(maxlen=self.limits.measurements)
        self.costs = deque(maxlen=self.limits.judged_steps_max)
        self.swap_seconds = deque(maxlen=self.limits.measurements)
        self.recompute_seconds = deque(maxlen=self.limits.measurements)
        self.activation_bytes = deque(maxlen=self.limits.measurements)

    @property
    def is_measured(self) -> bool:
        """Whether enough steps of the present plan have been measured to judge it."""
        return len(self.step_seconds) >= self.limits.measurements_before_judging

    @property
    def is_incomplete(self) -> bool:
        """Whether the step has to be profiled again."""
        return 0 < self.incomplete_profiles < self.limits.incomplete_profiles

    @property
    def gradients_in_update(self) -> int:
        """Bytes of gradients in memory during the update."""
        return max(self.held.gradients, self.profile.made_gradient_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether `executors` is full of steps that the host has ended and the device has not.

        Then no further step is measured. False if the backward of one of them has not ended: that one can be dropped.
        """
        return len(self.executors) == self.executors.maxlen and all(map(_has_ended, self.executors))

    def remember(self, executor: MeteredExecutor) -> None:
        """Keep a step's measurements until they are read. If `executors` is full, one is dropped (see `is_behind`)."""
        if len(self.executors) == self.executors.maxlen:
            abandoned = next((each for each in self.executors if not _has_ended(each)), self.executors[0])
            self.executors.remove(abandoned)
        self.executors.append(executor)

    def has_unfinished(self, schedule: Schedule) -> bool:
        """Return whether the backward of a step that follows this schedule has not ended on the host."""
        return any(each.schedule is schedule and not _has_ended(each) for each in self.executors)

    def trace(self, away_bytes: int | None = None) -> Trace:
        """Return the profile's trace, updated with the present memory use, measured durations and tested recipes.

        Parameters
        ----------
        away_bytes
            How many bytes of the optimizer state in `held` are not on the device. Default: `held.away`.
        """
        trace = self.profile.trace
        profile, held = self.profile, self.held
        held = held if away_bytes is None else replace(held, away=away_bytes)
        # A step does not allocate gradients that exist before it. So if more gradients exist now than before the
        # profiled step, the bytes that the profiled step allocated for gradients are subtracted.
        own = profile.gradient_bytes if held.gradients > profile.held.gradients else [0] * len(trace.nodes)
        more = [max(held.total - profile.held.total - made, held.kept - profile.held.kept) for made in own]
        nodes = trace.nodes
        seconds = self.search.reference_node_seconds
        if seconds is None and self.node_seconds:
            seconds = [median(column) for column in zip(*self.node_seconds, strict=True)]
        if seconds is not None:
            nodes = tuple(replace(node, seconds=s) for node, s in zip(nodes, seconds, strict=True))
        trace = replace(trace, nodes=nodes, base_bytes=tuple(map(sum, zip(trace.base_bytes, more, strict=True))))
        if self.recipes is None:
            return trace
        slowed = self.search.recompute_byte_seconds
        return self.recipes.added_to(trace, self.recompute_factors, self.link.swap_seconds, slowed)

    def follow(self, plan: Plan, limit_bytes: int | None) -> None:
        """Make the next steps follow `plan`. Tensors that were late are prefetched earlier, within `limit_bytes`."""
        held = next((known for earlier, known in self.plans_held if earlier is plan), self.held)
        if self.late:
            plan = with_earlier_prefetches(plan, self.late, plan.peak_bytes if limit_bytes is None else limit_bytes)
        if self.recipes is not None:
            plan = replace(plan, refusals=self.recipes.refusals)
        if self.plan is not None:
            log.info("new plan: %s", plan.summary())
        self.plan, self.plan_held, self.refusal, self.known = plan, held, None, None
        self.plans_held.append((plan, held))
        self.weights = ActivationBytes.of_plan(plan)
        measured = self.recipes.measured if self.recipes is not None else None
        self.schedule = planned_schedule(self.profile.order, plan, self.profile.members, measured)
        self.reference = None
        self.search.repeats = 0
        self._forget_measured_steps()
        self.recompute_seconds.clear()
        self.activation_bytes.clear()
        self.late_tensors = 0

    def restart_search(self) -> None:
        """Begin the search again. Plans tried so far do not count; the present one is measured anew, if it stays."""
        self.search.restart()
        self.plans_held = [(plan, held) for plan, held in self.plans_held if plan is self.plan]
        self.search.repeats = self.replans = 0
        self.reference = None  # after a search, reference steps make copies; in one, they may keep every tensor
        self._forget_measured_steps()

    def measure_again(self) -> None:
        """Measure the plan again: other programs slowed its steps, or reference steps cannot keep every tensor now."""
        self.search.repeats += 1
        self.search.steps += len(self.costs) + len(self.search.references)
        self.reference = None  # whether it may keep every tensor depends on the free memory, which may have changed
        self._forget_measured_steps()

    def _forget_measured_steps(self) -> None:
        self.plan_steps = 0
        self.search.forget_steps()
        self.step_seconds.clear()
        self.costs.clear()

    def make_reference(self, *, keeps_all: bool) -> Schedule:
        """Make the schedule of the plan's next reference steps, if this has not been done, and return it.

        `keeps_all`: the steps keep every tensor. Otherwise they stay within the plan's peak.
        """
        plan, order, members = self.plan, self.profile.order, self.profile.members
        assert plan is not None
        if self.reference is None or self.reference.is_serial == keeps_all:
            if keeps_all:
                self.reference = planned_schedule(order, make_plan(plan.trace, plan.link, ()), members)
            else:
                self.reference = serial_schedule(order, plan, members)
        return self.reference

    def exceeds(self, limit_bytes: int, held: HeldBytes) -> bool:
        """Return whether the plan would exceed the limit with the bytes that are held now."""
        if self.plan is None:
            return False
        known = self.plan_held  # compares as `raised_to` does, but creates no object: nearly every step calls this
        more = max(0, held.state - known.state) + max(0, held.gradients - known.gradients) + known.away - held.away
        if self.recipes is not None:
            more += self.recipes.held_bytes(row.id for row in self.plan.recomputes)
        return self.plan.peak_bytes + more > limit_bytes

    def read_trial(self, counts: Counts, *, cheap: bool) -> bool:
        """Read the results of the trial step if it has ended. Return whether they were read."""
        if (trial := self.trial) is None or not trial.finished:
            return False
        self.trial, self.recipes = None, recipes_of(trial, self.profile.members, cheap=cheap)
        if self.plan is not None:
            self.plan = replace(self.plan, refusals=self.recipes.refusals)
        if (measured := trial.measured(len(self.profile.trace.nodes))) is not None:
            row = StepRecord(False, None, measured.step_seconds, measured.stall_seconds, is_trial=True)
            counts.steps_measured.append(row)
            if not self.profile.order.compiled_nodes:  # their trial runs each compiled submodule twice
                self.profile = self.profile.with_shorter_nodes(measured.node_seconds)
        return True

    def read_measurements(self, counts: Counts) -> None:
        """Read the measurements of steps that the device has finished, and record these steps in `counts`."""
        unread = []
        for executor in self.executors:
            if not executor.on_schedule:
                continue
            measured = executor.measured(len(self.profile.trace.nodes))
            self.is_unjudged |= measured is not None
            if measured is None:
                unread.append(executor)
            elif executor.is_disturbed:
                counts.unmeasured_steps += 1
            elif executor.schedule is self.reference:
                self.search.add_reference(measured, self.costs)
                row = StepRecord(False, None, measured.step_seconds, measured.stall_seconds, is_reference=True)
                counts.steps_measured.append(row)
            elif executor.schedule is self.schedule:
                counts.steps_measured.append(self._take_in(measured, executor.recompute_seconds))
                self._take_in_late(executor, measured, counts)
                if executor.peak_bytes is not None:
                    self.activation_bytes.append(executor.peak_bytes)
        self.executors.clear()
        self.executors.extend(unread)

    def _take_in(self, measured: Measured, recompute_seconds: float) -> StepRecord:
        plan = self.plan
        assert plan is not None
        # Recomputation runs in hooks: it is part of the time of hooks, not of the durations of nodes.
        moved = len(plan.swaps) + len(plan.recomputes)
        if moved:
            self.swap_seconds.append(max(0.0, measured.hook_seconds - recompute_seconds) / moved)
        tried = self.recipes.seconds_of(plan) if self.recipes is not None else 0.0
        if tried and measured.hook_seconds:  # zero on an accelerator: hooks are not timed there
            self.recompute_seconds.append(recompute_seconds)
            factor = median(self.recompute_seconds) / tried
            self.recompute_factors.update(dict.fromkeys((row.id for row in plan.recomputes), factor))
        # The plan assumes that copies lengthen the step by `slowed`. Part of it shows as waits that were not predicted.
        # The durations of nodes include no waits, so only the rest is subtracted from them.
        predicted_waits = plan.step_seconds - plan.compute_seconds - plan.recompute_seconds
        more_waits = max(0.0, measured.stall_seconds - measured.hook_seconds - predicted_waits)
        slowed = plan.overhead_seconds - len(plan.swaps) * plan.link.swap_seconds
        self.node_seconds.append(without_slowing(measured.node_seconds, max(0.0, slowed - more_waits)))
        if self.step_seconds:  # on the CPU, a plan's first step also allocates what was released before it
            self.costs.append(StepCost.of(measured))
        self.step_seconds.append(measured.step_seconds)
        self.starts = measured.starts
        if node_log.isEnabledFor(logging.DEBUG):
            rows = zip(plan.trace.nodes, plan.timing.start, measured.starts, strict=True)
            words = "node %d (%s): start predicted %.6f s, measured %.6f s"
            for number, (node, predicted, found) in enumerate(rows):
                node_log.debug(words, number, node.name, predicted, found)
        return StepRecord(False, plan.expected_seconds, measured.step_seconds, measured.stall_seconds)

    def _take_in_late(self, executor: MeteredExecutor, measured: Measured, counts: Counts) -> None:
        assert self.plan is not None
        if not self.plan.swaps:  # nothing can be late
            self.late, self.late_tensors = {}, 0
            return
        owner = {index: tensor for tensor, indices in self.profile.members.items() for index in indices}
        swapped = {swap.id for swap in self.plan.swaps}
        self.late = {}
        for index, seconds in measured.waits.items():
            tensor = owner.get(self.profile.order.duplicates.get(index, index))
            if tensor in swapped and seconds > self.limits.late_seconds:
                self.late[tensor] = self.late.get(tensor, 0.0) + seconds
        late = executor.late_packs(measured, self.limits.late_seconds).keys()
        self.late_tensors = len({owner[index] for index in late if index in owner})
        counts.prefetched_late += len(late - executor.missed)

    def reasons_to_replan(self, link: Link) -> list[str]:
        """Return how measured steps and the measured `link` differ from the plan; empty if the plan may stay."""
        plan = self.plan
        assert plan is not None
        measured = median(self.step_seconds)
        compute = median(sum(row) for row in self.node_seconds)
        reasons = []
        if abs(measured - plan.expected_seconds) > self.limits.tolerance * plan.expected_seconds:
            reasons.append(f"a step took {format_seconds(measured)}, predicted {format_seconds(plan.expected_seconds)}")
        if abs(compute - plan.compute_seconds) > self.limits.tolerance * plan.compute_seconds:
            expected = format_seconds(plan.compute_seconds)
            reasons.append(f"computation took {format_seconds(compute)}, predicted {expected}")
        for name, found, known in (
            ("copy-out", link.out_bandwidth, self.link.out_bandwidth),
            ("copy-in", link.in_bandwidth, self.link.in_bandwidth),
        ):
            if found < (1 - self.limits.tolerance) * known:
                reasons.append(f"{name} is slower than planned")
            elif found > (1 + self.limits.faster_link) * known:
                reasons.append(f"{name} is faster than planned, so a better plan may exist")
        return reasons


def _has_ended(executor: MeteredExecutor) -> bool:
    """Return whether the step's backward has ended on the host, so that its measurements will be read."""
    return executor.stopwatch is not None and executor.stopwatch.finished
