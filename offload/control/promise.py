"""Decides by measured steps whether a signature's plan keeps `max_slowdown`, and when another plan is due."""

from __future__ import annotations

import logging
from dataclasses import replace
from statistics import median

from offload.control.limits import Limits
from offload.control.planned_step import PlannedStep
from offload.control.wanted_plan import measured_link
from offload.options import Options
from offload.plan import Link, least_feasible_limit, make_plan
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine

__all__ = ["SlowdownPromise"]

log = logging.getLogger("offload")


class SlowdownPromise:
    """The promise of a session, over the reference steps and plans of its signatures (`Frontier`).

    Parameters
    ----------
    options
        What the caller asked for.
    limits
        Bounds and tolerances.
    engine
        Has copied. On an accelerator copies do not slow the computation, and only the first steps are measured: there
        `max_slowdown` is kept as the plan predicts it.
    """

    def __init__(self, options: Options, limits: Limits, engine: Engine) -> None:
        self._options = options
        self._limits = limits
        self._engine = engine
        self._on_cpu = engine.device.type == "cpu"

    def applies(self, planned: PlannedStep) -> bool:
        """Whether the plan's steps are to be compared with reference steps."""
        plan = planned.plan
        moves = plan is not None and bool(plan.swaps or plan.recomputes)
        return moves and self._on_cpu and self._options.max_slowdown is not None

    def is_open(self, planned: PlannedStep) -> bool:
        """Whether it is not known yet that the plan may stay."""
        return self.applies(planned) and not planned.frontier.is_settled

    def begin_reference(self, planned: PlannedStep, counts: Counts) -> bool:
        """Count the step that begins; True where it is to be a reference step."""
        if self._wants_reference(planned):
            planned.frontier.begun += 1
            counts.reference_steps += 1
            return True
        planned.plan_steps += 1
        return False

    def needs_plan(self, planned: PlannedStep) -> bool:
        """Whether the last steps differ so much that a new plan is due. New plans are limited in number and logged."""
        if not planned.is_measured:
            return False
        link = measured_link(self._engine, planned.link)
        if planned.swap_seconds:
            link = replace(link, swap_seconds=median(planned.swap_seconds))
        if self.applies(planned):
            return self._is_broken(planned, link)
        if planned.replans >= self._limits.replans:
            return False
        reasons = planned.reasons_to_replan(link)
        if reasons:
            planned.replans += 1
            planned.link = link
            log.info("planning again (%d of at most %d): %s", planned.replans, self._limits.replans, "; ".join(reasons))
        return bool(reasons)

    def _wants_reference(self, planned: PlannedStep) -> bool:
        if not self.applies(planned):
            return False
        if planned.frontier.is_settled:
            return planned.steps % self._limits.recheck_steps == 0
        return planned.frontier.is_due(planned.plan_steps)

    def _is_broken(self, planned: PlannedStep, link: Link) -> bool:
        """Whether another plan is due, for the link as measured; where none is, the best one so far stays."""
        frontier, plan, allowed = planned.frontier, planned.plan, self._options.max_slowdown
        assert plan is not None
        assert allowed is not None
        if frontier.is_settled:
            if frontier.is_broken(allowed):
                log.info("planning again: beside the last %d reference steps all were too slow", len(frontier.looks))
                frontier.start_again()
                planned.replans = 0
            return not frontier.is_settled
        if frontier.judge(plan, planned.step_seconds) is None:
            return False
        reason = frontier.reason_to_move(allowed, least_feasible_limit(plan.trace))
        if reason is None or planned.replans >= self._limits.replans:
            self._settle(planned, allowed)
            return False
        planned.replans += 1
        planned.link = replace(link, byte_seconds=frontier.byte_seconds(plan, planned.computed_seconds, link))
        log.info("planning again (%d of at most %d): %s", planned.replans, self._limits.replans, reason)
        return True

    def options_of(self, planned: PlannedStep) -> Options:
        """What the next plan is made for: after the first one a little less than what was promised."""
        options = self._options
        if options.max_slowdown is None or not planned.frontier.tried:
            return options
        return replace(options, max_slowdown=self._limits.aim * options.max_slowdown)

    def _settle(self, planned: PlannedStep, allowed: float) -> None:
        """Stay with the plan of least memory that kept the promise, or swap nothing where none did."""
        frontier, limit_bytes = planned.frontier, self._options.memory_limit
        plan = frontier.best(allowed)
        if plan is None:
            plan = make_plan(planned.trace(), planned.link, ())
            if limit_bytes is not None and plan.peak_bytes > limit_bytes:
                plan = min(frontier.tried, key=lambda each: each.slowdown).plan
        frontier.is_settled = True
        if plan is not planned.plan:
            log.info("back to a plan with %d swaps: the last one is too slow, or takes more memory", len(plan.swaps))
            planned.late = {}
            planned.follow(plan, limit_bytes)
