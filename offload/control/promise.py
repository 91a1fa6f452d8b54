"""Decides from measured steps whether a plan keeps `max_slowdown`, and when another plan is due.

Each signature (the shapes and kinds of a step's inputs) has its own plan.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median

from offload.control.earlier_search import earlier_searches
from offload.control.limits import Limits
from offload.control.next_plan import next_plan
from offload.control.own_copies import OwnCopies
from offload.control.planned_step import PlannedStep
from offload.control.search_end import last_plan
from offload.control.state_plan import StatePlanner
from offload.control.tried_plan import most_promising
from offload.devices.accelerator import Accelerator, driven_devices
from offload.devices.allocator import release_free_memory
from offload.devices.device import device_of
from offload.devices.memory import free_bytes
from offload.devices.processes import local_processes
from offload.options import Options
from offload.plan import Link, Plan, least_feasible_limit
from offload.plan.trace import Trace
from offload.profiling.calibration import forget_disturbed
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.runtime.executor import ScheduleExecutor, Stopwatch
from offload.runtime.schedule import Schedule
from offload.units import format_bytes

__all__ = ["SlowdownPromise"]

log = logging.getLogger("offload")


class SlowdownPromise:
    """Makes a session's plans, and keeps `max_slowdown` (the promise).

    To do so, it compares the steps of each plan with reference steps: steps in which no copy slows the computation
    (`plan_search.py`).

    Parameters
    ----------
    options
        The caller's arguments.
    limits
        Bounds and tolerances.
    engine
        The engine whose copies are measured.
    copies
        The measured speed of the engine's copies.
    plan_state
        Chooses how much optimizer state plans move, and when. None if none can move.
    """

    def __init__(
        self,
        options: Options,
        limits: Limits,
        engine: Engine,
        copies: OwnCopies,
        plan_state: StatePlanner | None = None,
    ) -> None:
        self._options = options
        self._limits = limits
        self._engine = engine
        self._on_cpu = engine.device.type == "cpu"
        self._plan_state = plan_state
        self._earlier = earlier_searches(engine.device, options, limits)
        self._copies = copies
        self._reference: Stopwatch | None = None  # of the last reference step, until the next step begins

    def applies(self, planned: PlannedStep) -> bool:
        """Return whether the plan's steps are to be compared with reference steps."""
        plan = planned.plan
        moves = plan is not None and bool(plan.swaps or plan.recomputes)
        return moves and self._options.max_slowdown is not None

    def is_open(self, planned: PlannedStep) -> bool:
        """Return whether the search for a plan that keeps the promise goes on."""
        return self.applies(planned) and not planned.search.is_settled

    def begin_reference(self, planned: PlannedStep, counts: Counts) -> bool:
        """Count the step that begins. Returns whether it is to be a reference step."""
        if self._wants_reference(planned):
            planned.search.begun += 1
            counts.reference_steps += 1
            return True
        planned.plan_steps += not planned.is_behind  # `PlanSearch.is_due` counts only steps that can be measured
        return False

    def reference_schedule(self, planned: PlannedStep) -> Schedule:
        """Return the schedule of the reference step that begins.

        During a search, such a step keeps every tensor if no `memory_limit` is given and enough memory is free; on the
        CPU, only if the plan lowers the peak by at most `kept_share`. It then takes as long as a step without offload,
        but for its hooks. Otherwise the tensors that the plan swaps or recomputes are copied in a few groups, within
        the plan's peak (`plan/serial.py`). Computation stops during each copy; this time is not counted. All reference
        steps of one measurement follow one schedule.

        On an accelerator, computation is faster in steps with such waits: a device that has paused computes faster for
        a while. Plans that are compared with them seem slower than they are, and fewer bytes are saved than
        `max_slowdown` allows.
        """
        plan = planned.plan
        assert plan is not None
        if planned.reference is not None and not planned.search.is_settled:
            return planned.reference
        keeps_all = not planned.search.is_settled and self._may_keep_all(planned)
        reference = planned.make_reference(keeps_all=keeps_all)
        planned.search.waits = reference.waits if self._on_cpu else frozenset()
        return reference

    def _may_keep_all(self, planned: PlannedStep) -> bool:
        """Return whether a reference step that begins now may keep every tensor."""
        plan, limits, device = planned.plan, self._limits, self._engine.device
        assert plan is not None
        if self._options.memory_limit is not None or planned.is_keeping_refused:
            return False
        more_bytes = plan.unswapped_peak_bytes - plan.peak_bytes
        processes = local_processes()  # all may take such a step at the same time
        if self._on_cpu:
            is_small = more_bytes <= limits.kept_share * plan.unswapped_peak_bytes
            return is_small and limits.kept_room * processes * more_bytes <= free_bytes(device)
        # All that the step allocates has to fit: its peak without what is in use before it (`base_bytes`), which is not
        # free anyway. This includes `more_bytes` once, hence − 1.
        needed_bytes = plan.unswapped_peak_bytes - min(plan.trace.base_bytes, default=0)
        spare = limits.device_kept_room * ceil(processes / max(1, driven_devices())) - 1
        return needed_bytes + spare * more_bytes <= free_bytes(device)

    def start_stopwatch(self, schedule: Schedule) -> Stopwatch:
        """Return the stopwatch of a measured step that begins and follows this schedule.

        If the step is a reference step with copies, its copy-outs are deferred. When the step waits for one of them,
        all those queued so far begin. Without effect on an accelerator: there, copy-outs run during the computation,
        because they hardly slow it.
        """
        self.end_overlap()  # before the clock starts, because the step waits here
        stopwatch = Stopwatch(self._engine)
        if schedule.is_serial:
            self._reference = stopwatch
            stopwatch.defer_copy_outs()
        return stopwatch

    def end_reference(self) -> None:
        """Copy out in the background again, even if the last reference step has not run its backward."""
        if self._reference is not None:
            self._reference.end_deferral()
            self._reference = None

    def needs_plan(self, planned: PlannedStep) -> bool:
        """Return whether measured steps show that a new plan is due.

        They are compared with reference steps if `applies(planned)`, otherwise with the plan's predictions. If the
        search for a plan ends here, the plan of `last_plan` is followed from now on. If a new plan is due, logs the
        reason, and counts the new plan in `planned.replans`. If an ended search starts again, this count is set to 0
        instead. After the search, a rejected plan may be followed, to measure it again.
        """
        link = self.own_link(planned.link)
        if not planned.is_measured:
            return False
        forget_disturbed()
        if planned.swap_seconds:
            link = replace(link, swap_seconds=median(planned.swap_seconds))
        if self._remeasure(planned):
            return False
        if self.applies(planned):
            return self._needs_other_plan(planned, link)
        if planned.replans >= self._limits.replans or planned.search.is_settled or self._is_best(planned):
            return False
        reasons = planned.reasons_to_replan(link)
        if reasons:
            planned.replans += 1
            planned.link = link
            log.info("planning again (%d of at most %d): %s", planned.replans, self._limits.replans, "; ".join(reasons))
        return bool(reasons)

    def own_link(self, known: Link) -> Link:
        """Return `known` with the bandwidth of this engine's copies, in each direction if they took long enough."""
        self._copies.read()
        return self._copies.link(known)

    def _is_best(self, planned: PlannedStep) -> bool:
        """Return whether `memory_limit` is the only goal, and the plan keeps it without moving anything."""
        plan = planned.plan
        assert plan is not None
        moves = plan.swaps or plan.recomputes or (plan.state is not None and plan.state.moved)
        return not moves and self._options.max_slowdown is None and self._options.memory_limit is not None

    def _wants_reference(self, planned: PlannedStep) -> bool:
        if not self.applies(planned) or planned.is_behind:
            return False
        search, allowed = planned.search, self._options.max_slowdown
        assert allowed is not None
        if search.is_settled:
            if not search.watch.is_due(planned.steps, allowed):
                return False
            search.watch.begin()
            return self._on_cpu or not search.compare_with_search(planned.plan, planned.costs)
        if not search.is_due(planned.plan_steps):
            return False
        kept = planned.reference if planned.reference is not None and not planned.reference.is_serial else None
        if kept is None:
            return True
        planned.is_keeping_refused |= planned.has_unfinished(kept)
        if self._may_keep_all(planned):
            return True
        planned.measure_again()
        return False

    def _needs_other_plan(self, planned: PlannedStep, link: Link) -> bool:
        """Return whether another plan is due. If the search ends, the plan of `last_plan` is followed."""
        search, plan, allowed = planned.search, planned.plan, self._options.max_slowdown
        assert plan is not None
        assert allowed is not None
        if search.is_settled:
            if search.watch.is_broken(allowed):
                log.info(
                    "searching again: steps were slower than max_slowdown allows in each of the last %d comparisons",
                    len(search.watch.looks),
                )
                planned.restart_search()
            return False
        costs = [*planned.costs][-search.pairs_max :]
        if search.are_disturbed(costs) and search.repeats < self._limits.repeats:
            planned.measure_again()
            return False
        keeps_all = planned.reference is not None and not planned.reference.is_serial
        if search.judge(plan, costs, allowed, keeps_all=keeps_all) is None:
            return False
        reason = search.reason_to_move(allowed, least_feasible_limit(plan.trace))
        limits = self._limits
        has_tried_enough = planned.replans >= limits.replans or search.steps >= limits.search_steps
        if reason is None or has_tried_enough or search.plan_before is not None:
            may_go_on = not has_tried_enough and search.plan_before is None
            unmeasured = self._unmeasured_best(planned) if may_go_on else None
            if unmeasured is None:
                self._settle(planned)
                return False
            planned.replans += 1
            planned.follow(unmeasured, self._options.memory_limit)
            return False
        planned.replans += 1
        planned.link = search.learn(link)
        log.info("planning again (%d of at most %d): %s", planned.replans, self._limits.replans, reason)
        return True

    def _remeasure(self, planned: PlannedStep) -> bool:
        """Begin to measure a rejected plan again, if this is due and promises enough. Return whether it has begun.

        In a search, a plan is also rejected if only its margin of error exceeds `max_slowdown`. More steps make the
        margin smaller. When the plan has been judged, the search ends again.
        """
        search, plan, allowed = planned.search, planned.plan, self._options.max_slowdown
        if allowed is None or plan is None or not (search.is_settled and search.tried):
            return False
        looks = search.watch.looks
        if (looks and looks[-1] > allowed) or not search.watch.is_remeasuring_due(planned.steps):
            return False
        gain_min = self._limits.remeasure_gain * plan.unswapped_peak_bytes
        found = most_promising(search.tried, plan, allowed, gain_min, self._limits)
        if found is None:
            return False
        peaks = format_bytes(found.plan.peak_bytes), format_bytes(plan.peak_bytes)
        log.info("measuring a plan again, with a peak of %s instead of %s: it was %s slower", *peaks, found.in_words)
        search.reopen(plan)
        planned.late = {}  # these tensors were late in another plan
        planned.follow(found.plan, self._options.memory_limit)
        return True

    def is_outdated(self, planned: PlannedStep) -> bool:
        """Return whether a new plan is due because an optimizer made its very first update after the plan was made.

        If so, the search begins again, and a second call returns False.
        """
        if self._plan_state is None or planned.plan is None or not self._plan_state.is_outdated(planned):
            return False
        planned.restart_search()
        return True

    def plan(self, planned: PlannedStep) -> Plan:
        """Return the next plan.

        Raises
        ------
        InfeasibleLimitError
            No plan keeps the memory limit.
        """
        if not self._on_cpu:
            self._engine.store.restart_high_water()
        try:
            if self._plan_state is not None:
                return self._plan_state.plan(planned, partial(self._plan, planned))
            return self._plan(planned, planned.trace())
        finally:
            self._release()

    def needs_hooks(self, planned: PlannedStep) -> bool:
        """Return whether steps that are not measured need hooks after the search.

        They do if there is a memory limit, if the plan moves tensors, or if optimizer state is copied during the step.
        """
        plan = planned.plan
        assert plan is not None
        if plan.swaps or plan.recomputes or self._options.memory_limit is not None:
            return True
        # On the CPU, copies of optimizer state during a step save no time (docs/optimizer.md).
        return not self._on_cpu and self._plan_state is not None and self._plan_state.overlap(planned) is not None

    def let_overlap(self, planned: PlannedStep, executor: ScheduleExecutor) -> None:
        """Let optimizer state be copied during a steady step that is not measured, where its plan leaves memory free.

        Steps of a search have no such copies: what they add would count as a part of the plan's slowdown.
        """
        if self._plan_state is not None:
            self._plan_state.let_overlap(planned, executor)

    def end_overlap(self) -> None:
        """Before a measured or profiled step, wait for copies of optimizer state that the previous step has allowed."""
        if self._plan_state is not None:
            self._plan_state.end_overlap()

    def release_pinned(self) -> None:
        """Unpin host memory that no step has needed since the planner last ran, if it is over `spare_pinned_bytes`.

        The profiled step needs more than others: it copies out every tensor.
        """
        if self._on_cpu:
            return
        stats = self._engine.store.stats()
        keep_bytes = int(self._limits.pinned_share * stats["pool_high_water_bytes"])
        if stats["pool_held_bytes"] > keep_bytes + self._limits.spare_pinned_bytes:
            freed_bytes = self._engine.store.trim_pool(keep_bytes)
            if freed_bytes:
                log.info("unpinned %s of host memory", format_bytes(freed_bytes))

    def _release(self) -> None:
        """Make malloc return free memory to the system, such as memory that the profile and the search have used."""
        if self._on_cpu:
            release_free_memory()

    def _plan(self, planned: PlannedStep, trace: Trace) -> Plan:
        plan = next_plan(planned, trace, self._options, self._limits, self._engine.device, self._earlier)
        if plan is None:
            plan = self._unmeasured_best(planned)
        return self._end_search(planned) if plan is None else plan

    def _unmeasured_best(self, planned: PlannedStep) -> Plan | None:
        """Return a plan of an earlier training that is to be measured before the search ends; None if there is none."""
        allowed = self._options.max_slowdown
        plan = None if allowed is None else planned.search.unmeasured_best(allowed)
        if plan is not None:
            log.info("measuring a plan of an earlier training, with a peak of %s", format_bytes(plan.peak_bytes))
            planned.late = {}  # these tensors were late in another plan
        return plan

    def _settle(self, planned: PlannedStep) -> None:
        """End the search, and follow the plan that it ends with."""
        plan = self._end_search(planned)
        if plan is not planned.plan:
            planned.follow(plan, self._options.memory_limit)
        self._release()

    def _end_search(self, planned: PlannedStep) -> Plan:
        """End the search. Return the plan that it ends with.

        On an accelerator, makes torch's allocator release its cache if reference steps kept every tensor: later steps
        need less.
        """
        search = planned.search
        search.is_settled = True
        planned.late = {}  # these tensors were late in the last plan: they must not change the prefetches of another
        planned.reference = None  # measurements of its steps that arrive later do not count
        device = device_of(self._engine.device)
        if isinstance(device, Accelerator) and any(each.keeps_all for each in search.tried):
            device.release_cached()
        plan = last_plan(planned, self._options, self._limits)
        search.plan_before, search.watch.ended_at = None, planned.steps
        if self._earlier is not None:
            self._earlier.keep(search, plan)
        return plan
