"""Builds the report of one enabled model: its counts, its verdict and notes.

It only reads the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offload.control.controller import PlanController
from offload.control.device_session import DeviceSession
from offload.control.enabled_model import EnabledModel
from offload.control.manual import ManualController
from offload.control.planned_step import PlannedStep
from offload.devices import allocator
from offload.diagnostics.assessment import Subject, assess, weigh_process
from offload.diagnostics.report import DiskWrites, Feed, Report
from offload.diagnostics.verdict import Verdict
from offload.optimizer_state.counts import GradientCounts, StateCounts
from offload.optimizer_state.in_backward import BackwardCounts
from offload.options import is_in_memory
from offload.parameters.mover import ParameterCounts
from offload.plan import Link
from offload.plan.trace import Trace
from offload.runtime.counters import Count
from offload.runtime.refusals import HOOKS_AROUND

__all__ = ["make_report", "make_verdict", "recorded_trace", "tier"]


def make_report(
    enabled: EnabledModel,
    feeds: Sequence[Feed],
    remarks: Sequence[str],
    states: Sequence[StateCounts],
    in_backward: Sequence[BackwardCounts],
    gradients: Sequence[GradientCounts],
) -> Report:
    """Return the report of an enabled model.

    `feeds` are the counters of its `contrib.Prefetcher` objects, `remarks` further notes, `states` the counters of its
    optimizers' state, `in_backward` those of the updates in backward, and `gradients` those of gradients that leave.
    """
    here = enabled.on_device
    here.engine.collect()
    counts = here.counts
    here.latest()
    counts.attribute_misses(here.engine.misses)
    kept = {reason: count.copy() for reason, count in counts.items() if count.tensors}
    if failed := here.engine.failed:
        kept["write failed"] = Count(failed, here.engine.failed_bytes)
    return Report(
        verdict=weigh_process(make_verdict(enabled)),
        steps=counts.steps,
        device=str(here.device),
        tier=tier(here),
        allocator=allocator.describe() if here.device.type == "cpu" else "torch's caching allocator",
        swapped=here.swapped,
        kept=kept,
        deduplicated=counts.duplicates.copy(),
        store=here.engine.store_stats(),
        misses=here.engine.misses,
        prefetched=counts.prefetched,
        loaded_late=counts.loaded_late,
        prefetched_late=counts.prefetched_late,
        unmeasured_steps=counts.unmeasured_steps,
        profiled_steps=counts.profiled_steps,
        trial_steps=counts.trial_steps,
        reference_steps=counts.reference_steps,
        recomputed=counts.recomputed.copy(),
        recompute_seconds=counts.recompute_seconds,
        regions=here.controller.regions.chosen if isinstance(here.controller, PlanController) else (),
        borrowed_steps=counts.borrowed_steps,
        bare_steps=counts.bare_steps,
        settled_steps=counts.settled_steps,
        steps_measured=tuple(counts.steps_measured),
        notes=(
            *_notes(enabled),
            *(note for feed in feeds for note in feed.notes()),
            *(note for state in states for note in state.notes()),
            *(note for counts in gradients for note in counts.notes()),
            *(enabled.parameters.counts.notes() if enabled.parameters is not None else ()),
            *remarks,
        ),
        feed=Feed.total(feeds),
        plan=main.plan if isinstance(main := here.controller.main, PlannedStep) else None,
        optimizer_state=tuple(replace(state) for state in states),
        step_in_backward=tuple(replace(counts) for counts in in_backward),
        gradients=tuple(replace(counts) for counts in gradients),
        moved_parameters=_parameters(enabled),
        disk=_disk_writes(here),
    )


def _parameters(enabled: EnabledModel) -> ParameterCounts | None:
    if enabled.parameters is None:
        return None
    enabled.parameters.look()
    return replace(enabled.parameters.counts)


def _disk_writes(here: DeviceSession) -> DiskWrites:
    stats, is_direct = here.engine.store_stats(), not here.engine.is_accelerator
    if is_direct and is_in_memory(here.options.spill_dir):
        return DiskWrites(0, here.counts.steps, 0.0)
    written = stats["out_bytes"] if is_direct else stats["spill_written_bytes"]
    return DiskWrites(int(written), here.counts.steps, time.monotonic() - here.counts.began)


def make_verdict(enabled: EnabledModel) -> Verdict:
    """Return the verdict on planned steps, as far as it is known."""
    here = enabled.on_device
    return assess(
        Subject(
            here.controller,
            here.options,
            here.engine,
            here.counts,
            is_disabled=not enabled.is_enabled,
            left_to_checkpoint=enabled.left_to_checkpoint,
            problems=[enabled.misplaced] if enabled.misplaced else [],
            parameters_away_bytes=enabled.parameters.bytes_away_min() if enabled.parameters is not None else 0,
        )
    )


def tier(here: DeviceSession) -> str:
    """Return a text for the tier below the device."""
    spill_dir = here.options.spill_dir
    if here.device.type == "cpu":
        return f"disk ({spill_dir})"
    return "pinned RAM" + (f", then disk ({spill_dir})" if spill_dir else "")


def recorded_trace(controller: ManualController | PlanController) -> Trace:
    """Return the latest profiled step with the measured link; see `Session.trace`."""
    if not isinstance(controller, PlanController):
        raise RuntimeError('n_tensors profiles nothing; for a trace, add lb="auto" or enable without n_tensors')
    planned = controller.latest()
    if planned is None:
        raise RuntimeError("no step has been profiled yet: run one forward and backward pass in training mode first")
    found = planned.link
    return replace(planned.trace(), link=Link(found.out_bandwidth, found.in_bandwidth, found.latency))


def _notes(enabled: EnabledModel) -> Iterator[str]:
    here = enabled.on_device
    counts = here.counts
    if enabled.misplaced:
        yield enabled.misplaced
    if here.options.n_tensors == 0:
        yield "NO SAVED TENSOR IS SWAPPED: n_tensors=0"
    elif counts.steps == 0 and enabled.left_to_checkpoint:
        yield (
            "NOTHING WAS SWAPPED: the whole model runs inside torch.utils.checkpoint, which saves only its input; "
            "checkpoint blocks inside the model instead, or none"
        )
    elif counts.steps == 0:
        yield (
            "NOTHING WAS SWAPPED: no training step has run yet (eval() and no_grad() are left alone, and so is a "
            "compiled wrapper that is called from inside another compiled function: enable the inner model then)"
        )
    elif counts.swapped.tensors == 0:
        reasons = sorted(counts.items(), key=lambda item: -item[1].nbytes)
        largest = ", ".join(f"{count.tensors} {reason}" for reason, count in reasons[:3] if count.tensors)
        yield f"NOTHING WAS SWAPPED: every saved tensor was kept ({largest or 'none was saved'})"
    if enabled.hooks_around:
        yield HOOKS_AROUND.format(enabled.hooks_around)
    if counts.bare_steps:
        bare = f"{counts.bare_steps} of {counts.steps} steps ran without them"
        yield f"hooks are off while the plan swaps nothing ({bare})"
    if enabled.compiled_demand is not None:
        yield str(enabled.compiled_demand)
    yield from enabled.fallbacks.notes()
    if isinstance(here.controller, PlanController) and not here.controller.states.knows_temporaries:
        yield (
            "a step was profiled while another profiler ran, inside a backward pass or with its backward in another "
            "thread, or left before its backward had ended: its temporaries are unknown to the plan, and memory_limit "
            "does not count them"
        )
    if isinstance(here.controller, PlanController) and (why := here.controller.why_nothing_recomputed):
        yield f"nothing is recomputed: {why}"
    if here.engine.failed:
        yield f"{here.engine.failed} tensors stayed because writing them failed: {here.engine.failure}"
    if counts.prefetches_without_memory:
        count = counts.prefetches_without_memory
        yield f"{count} prefetches found no device memory; their tensors were loaded on demand"
    if here.options.spill_dir and is_in_memory(here.options.spill_dir):
        yield f"{here.options.spill_dir} is in RAM (tmpfs): swapping there frees no memory; give a spill_dir on a disk"
    if enabled.moved:
        yield enabled.moved
