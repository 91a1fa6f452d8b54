"""Builds the verdict of a report from the plan and the measurements of a session, without changing them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch

from offload.control.controller import PlanController
from offload.control.limits import LIMITS
from offload.control.manual import ManualController, ManualStep
from offload.control.planned_step import PlannedStep
from offload.devices import allocator
from offload.devices.proc import resident_set
from offload.diagnostics.verdict import Verdict
from offload.options import Options, is_in_memory
from offload.plan import unswapped_bytes
from offload.runtime.activations import unswapped_activations
from offload.runtime.counters import Counts
from offload.runtime.engine import Engine
from offload.units import format_bytes, parse_bytes, round_up_bytes

__all__ = ["Subject", "assess", "weigh_process", "wish"]

_SLOWER = 0.10  # relative; a step that is slower than predicted by more than this is a problem
_MORE = 0.05  # relative; more memory than planned by more than this and by _MORE_BYTES is a problem
_MORE_BYTES = 1 << 20


@dataclass(frozen=True)
class Subject:
    """The session that a verdict is about."""

    controller: ManualController | PlanController
    options: Options
    engine: Engine
    counts: Counts
    is_disabled: bool = False
    left_to_checkpoint: bool = False
    problems: Iterable[str] = ()  # problems that the caller has found
    parameters_away_bytes: int = 0  # of moved parameters that are never in memory at a time


def wish(options: Options) -> str:
    """Return the goal arguments of `offload.enable` as they are written in the call."""
    if options.n_tensors is not None:
        lead = '"auto"' if options.lookahead_nodes is None else options.lookahead_nodes
        return f"n_tensors={options.n_tensors}" + (f", lb={lead}" if options.n_tensors else "")
    if options.least_memory:
        return '"smallest"'
    asked = []
    if options.memory_limit is not None:
        text = round_up_bytes(options.memory_limit)
        is_exact = parse_bytes(text) == options.memory_limit
        asked.append(f'memory_limit="{text}"' if is_exact else f"memory_limit={options.memory_limit}")
    if options.max_slowdown is not None:
        asked.append(f"max_slowdown={options.max_slowdown:g}")
    return ", ".join(asked)


def assess(subject: Subject) -> Verdict:
    """Return the verdict on the planned steps of a session, as far as they are known."""
    options, controller, counts = subject.options, subject.controller, subject.counts
    verdict = Verdict("no step", str(subject.engine.device), wish(options), subject.is_disabled)
    if options.n_tensors == 0:
        verdict = replace(verdict, kind="off")
    elif counts.steps == 0:
        if subject.left_to_checkpoint:
            reason = "the whole model runs inside torch.utils.checkpoint"
            verdict = replace(verdict, kind="unplanned", reason=reason)
    elif isinstance(controller, ManualController):
        verdict = _by_hand(verdict, controller.main, counts)
    else:
        verdict = _by_plan(verdict, controller, controller.main, subject)
    problems = (*subject.problems, *_problems(verdict, subject))
    return replace(verdict, is_short_of_writes=subject.engine.failed > 0, problems=problems)


def weigh_process(verdict: Verdict) -> Verdict:
    """Return the verdict with the process's resident set added, if malloc keeps memory that the engine frees."""
    name = allocator.current()
    if torch.device(verdict.device).type != "cpu" or not verdict.tensors_swapped or allocator.recycles(name):
        return verdict
    now, peak = resident_set()
    return replace(verdict, process_bytes=now, process_bytes_peak=peak, process_reason=allocator.remedy(name))


def _by_hand(verdict: Verdict, step: ManualStep | None, counts: Counts) -> Verdict:
    if step is None:
        reason = f"the first step of a shape is recorded; the next one follows {verdict.wish}"
        return replace(verdict, kind="profiling", reason=reason)
    entries = step.schedule.order.entries
    if not entries:
        return replace(verdict, kind="nothing to swap", reason=_nothing_can_move(counts))
    return replace(
        verdict,
        kind="by hand",
        activation_bytes=max(step.activation_bytes, default=None),
        activation_bytes_unswapped=max(step.weights.unswapped, default=None),
        steps_measured=len(step.step_seconds),
        step_seconds=median(step.step_seconds) if step.step_seconds else None,
        compute_seconds=median(step.compute_seconds) if step.compute_seconds else None,
        tensors=len(entries),
        tensors_swapped=len(step.schedule.swapped),
        late_tensors=len(step.late),
        late_seconds=sum(step.late.values()),
    )


def _by_plan(verdict: Verdict, controller: PlanController, planned: PlannedStep | None, subject: Subject) -> Verdict:
    if planned is None:
        if controller.states.gives_up:
            reason = "no two steps are alike, so every tensor is swapped and loaded on demand"
            return replace(verdict, kind="unplanned", reason=reason)
        return replace(verdict, kind="profiling", reason="the first step is not over yet")
    trace = planned.plan.trace if planned.plan is not None else planned.trace()
    before = controller.regions.before  # the profile without regions: no compiled part runs again in backward
    whole = before.trace() if before is not None else trace
    # If there are measured steps, uses only those whose times the verdict gives: other programs may have slowed others.
    known = list(planned.node_seconds)[-len(planned.step_seconds) :]
    compute = median(map(sum, known)) if known else sum(node.seconds for node in trace.nodes)
    judged = planned.search.judged(planned.plan) if planned.step_seconds else None
    if judged is not None:
        compute = median(planned.step_seconds) / (1 + judged.measured)
    compute -= controller.regions.seconds
    verdict = replace(
        verdict,
        regions=len(controller.regions.chosen),
        activation_bytes_unswapped=max(unswapped_activations(whole), default=None),
        compute_seconds=compute,
        reference_steps=judged.reference_steps if judged is not None else 0,
        tensors=len(trace.tensors),
    )
    refusal = planned.refusal
    if refusal is None and planned.plan is None:  # the optimizer's state is not known yet
        return replace(verdict, kind="profiling", reason="the next step of this shape follows a plan")
    if planned.profile.knows_temporaries:
        away_bytes = planned.held.away + subject.parameters_away_bytes  # in memory without offload
        verdict = replace(verdict, step_bytes_unswapped=max(unswapped_bytes(whole), default=0) + away_bytes)
    if refusal is not None:
        asked, least = refusal.limit_bytes, refusal.least_limit_bytes
        return replace(verdict, kind="refused", limit_bytes=asked, least_limit_bytes=least)
    return _planned(verdict, planned, subject)


def _planned(verdict: Verdict, planned: PlannedStep, subject: Subject) -> Verdict:
    plan, weights = planned.plan, planned.weights
    assert plan is not None
    assert weights is not None
    is_by_hand = subject.options.n_tensors is not None and len(plan.trace.tensors) > 0
    moves = plan.swaps or plan.recomputes or verdict.regions
    return replace(
        verdict,
        kind="by hand" if is_by_hand else "planned" if moves else "nothing to swap",
        activation_bytes=max(planned.activation_bytes, default=None),
        activation_bytes_planned=max(weights.planned, default=None),
        step_bytes_planned=plan.peak_bytes if planned.profile.knows_temporaries else None,
        steps_measured=len(planned.step_seconds),
        step_seconds=median(planned.step_seconds) if planned.step_seconds else None,
        step_seconds_planned=plan.expected_seconds,
        tensors_swapped=len(plan.swaps),
        tensors_recomputed=len(plan.recomputes),
        recompute_seconds=plan.recompute_seconds,
        late_tensors=planned.late_tensors,
        late_seconds=sum(planned.late.values()),
        late_seconds_planned=plan.step_seconds - plan.compute_seconds - plan.recompute_seconds,
        is_removed=subject.counts.bare_steps > 0,
        reason="" if is_by_hand or moves else _why_nothing(planned, subject),
    )


def _why_nothing(planned: PlannedStep, subject: Subject) -> str:
    plan, options = planned.plan, subject.options
    assert plan is not None
    if not plan.trace.tensors:
        return _nothing_can_move(subject.counts)
    if options.memory_limit is not None and options.max_slowdown is None:
        return f"all {len(plan.trace.tensors)} tensors stay, since the step fits within memory_limit with them"
    if options.least_memory:
        return "no swap lowers the peak"
    within = f"within {100 * (options.max_slowdown or 0):g} % of the step time"
    if options.memory_limit is not None:
        return f"no swap lowers the peak {within}"
    worth = plan.unswapped_peak_bytes - planned.limits.worthwhile_peak(plan.unswapped_peak_bytes)
    return f"no plan lowers the peak by at least {format_bytes(int(worth))} {within}"


def _nothing_can_move(counts: Counts) -> str:
    reasons = sorted((reason for reason in counts if reason != "parameter"), key=lambda reason: -counts[reason].nbytes)
    return f"no saved tensor can be swapped (kept: {', '.join(reasons[:3]) or 'none was saved'})"


def _problems(verdict: Verdict, subject: Subject) -> Iterable[str]:
    """Yield the reasons why planned steps differ from the plan."""
    if not (verdict.tensors_swapped or verdict.tensors_recomputed):
        return
    engine, counts = subject.engine, subject.counts
    if engine.failed:
        yield f"{engine.failed} tensors stayed, since writing them failed"
    stayed = sum(count.tensors for reason, count in counts.in_step()[1].items() if reason in _NO_ROOM)
    if stayed:
        yield f"{stayed} tensors stayed in the last step: no room below (host_limit, spill_dir)"
    if counts.prefetches_without_memory:
        yield f"{counts.prefetches_without_memory} prefetches found no device memory"
    if engine.device.type == "cpu" and is_in_memory(subject.options.spill_dir):
        yield f"swapping frees no memory: {subject.options.spill_dir} is in RAM (tmpfs)"
    found, planned = verdict.activation_bytes, verdict.activation_bytes_planned
    if found is not None and planned is not None and found > (1 + _MORE) * planned + _MORE_BYTES:
        yield f"{format_bytes(found - planned)} more activations in memory than planned"
    seconds, predicted = verdict.step_seconds, verdict.step_seconds_planned
    if verdict.steps_measured < LIMITS.measurements_before_judging:
        return  # other programs may have slowed one step
    if seconds is not None and predicted and seconds > (1 + _SLOWER) * predicted:
        yield f"the step is {100 * (seconds / predicted - 1):.0f} % slower than predicted"


_NO_ROOM = ("host limit", "pinning failed")
