"""Chooses the compiled submodules ("regions", see `runtime/regions.py`) that are recomputed as a whole.

1. A trial step runs each region twice.
2. Plans that recompute some of the regions are computed. If one of them is faster, the next step is profiled with its
   regions recomputed.
3. If the plan from this profile is not faster than the swap-only plan, no region is recomputed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from offload.control.limits import Limits
from offload.control.planned_step import PlannedStep
from offload.control.wanted_plan import wanted_plan
from offload.options import Options
from offload.plan import InfeasibleLimitError, Plan
from offload.plan.recompute import recomputed
from offload.plan.trace import Recompute, SavedTensor, Trace
from offload.runtime.engine import Engine
from offload.runtime.regions import Region, RegionTrial
from offload.runtime.weak import WeakReferences
from offload.torch_compat.compiled import compiled_parts

__all__ = ["CompiledRegions"]

log = logging.getLogger("offload")

_CHOICES = 6  # plans computed: with 1/6 of the regions recomputed, 2/6, ..., all
_NOT_WORTH_IT = "torch.compile made a part of the step, and running a compiled part again would not make it faster"
_RATIO = 1.5  # seconds per byte are rounded to powers of this; regions with the same result count as equal


@dataclass(frozen=True)
class _Tried:
    """A region that passed its trial."""

    name: str
    tensors: tuple[int, ...]  # ids in the trace of the tensors that it saves
    saved_bytes: int
    input_bytes: int
    seconds: float  # duration of its second run
    packed: int  # the node that starts after its first pack
    used: int  # first node of backward that uses its tensors


class CompiledRegions:
    """The regions of a model on one device.

    Parameters
    ----------
    is_in_step
        Whether this thread runs a training step of the model, and the step's saved-tensor hooks are the innermost ones.

    Attributes
    ----------
    before
        The planned step before regions were recomputed; None if no region is recomputed.
    refusals
        Why regions cannot be recomputed, by name.
    reason
        Why a trial led to no recomputed region; empty if regions are recomputed or no trial has run.
    """

    def __init__(self, options: Options, engine: Engine, limits: Limits, is_in_step: Callable[[], bool]) -> None:
        self.before: PlannedStep | None = None
        self.refusals: dict[str, str] = {}
        self.reason = ""
        self._options = options
        self._engine = engine
        self._limits = limits
        self._is_in_step = is_in_step
        self._regions: WeakReferences[Region] = WeakReferences()  # weak: the submodules own them
        self._tried: PlannedStep | None = None  # the planned step of the trial, until `choose`
        self._trials = 0
        self._is_settled = False
        self._is_new = False  # whether the chosen regions have no plan yet

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the regions that backward runs again."""
        return tuple(region.name for region in self._regions if region.is_checkpointed)

    @property
    def seconds(self) -> float:
        """Total duration of the chosen regions' second runs in the trial."""
        rows = (region.trial.seconds() for region in self._regions if region.is_checkpointed and region.trial)
        return sum(row or 0.0 for row in rows)

    def close(self) -> None:
        """Restore the compiled callables of all submodules."""
        for region in self._regions:
            region.close()
        self._regions = WeakReferences()

    def begin_trial(self, planned: PlannedStep, model: nn.Module) -> bool:
        """Make the next step, which must swap everything, a trial. Returns False if no region is tried."""
        options, plan = self._options, planned.plan
        is_wanted = options.recompute == "auto" and options.max_slowdown is None and options.memory_limit is not None
        if self._is_settled or not is_wanted or plan is None:
            return False
        self._is_settled = True
        self._trials += 1
        trace = planned.trace()
        rows = {tensor.id: tensor for tensor in trace.tensors}
        for name, part, slot in list(compiled_parts(model)):  # a Region replaces what the search reads
            inside = _tensors_of(name, planned)
            if not inside or any(_is_within(name, other) or _is_within(other, name) for other in options.exclude):
                continue
            packed = [rows[each].packed for each in inside]
            saved_bytes = sum(rows[each].bytes for each in inside)
            # The region computes in the node that its first pack ends; there, base_bytes includes what it saves.
            base_bytes = trace.base_bytes[max(0, min(packed) - 1) : max(packed) + 2]
            room = (options.memory_limit or 0) - max(base_bytes) - saved_bytes
            region = Region(name, part, slot, self._is_in_step)
            region.trial = RegionTrial(self._engine, room, saved_bytes)
            region.is_trying = True
            self._regions.add(region)
        self._tried = planned if any(self._regions) else None
        return self._tried is not None

    def end_trial(self) -> None:
        """End the trial step, because another step begins."""
        for region in self._regions:
            region.is_trying = False

    def repeat_trial(self, planned: PlannedStep) -> None:
        """Let the trial be repeated after a new profile, because its step deviated from the recorded one."""
        if self._tried is planned:
            self._tried, self._is_settled = None, self._trials >= self._limits.region_trials
            self.close()

    def choose(self, planned: PlannedStep, device_bytes: Callable[[], int]) -> bool:
        """Choose the regions to recompute, if a trial has ended. Returns whether the next step is to be profiled again.

        Every step calls this method. `device_bytes` reads figures of the system, so it is called only after a trial.
        """
        if self._tried is not planned:
            return False
        seconds = {region.name: region.trial.seconds() for region in self._regions if region.trial is not None}
        if None in seconds.values():
            return False  # the device has not finished the trial
        self._tried = None
        tried = []
        for region in self._regions:
            trial = region.trial
            assert trial is not None
            refusal = trial.refusal if trial.calls == 1 else f"it ran {trial.calls} times in the step"
            if refusal:
                self.refusals[region.name] = refusal
                log.info("%s is not recomputed: %s", region.name, refusal)
            else:
                tried.append(_row(region.name, planned, trial.input_bytes, seconds[region.name] or 0.0))
        best = self._best(planned, tried, device_bytes())
        for region in self._regions:
            region.is_checkpointed = region.name in best
        if best:
            self.before, self._is_new = planned, True
            log.info("recomputed as a whole from the next step on: %s", ", ".join(sorted(best)))
        else:
            self.reason = _NOT_WORTH_IT if tried else "; ".join(f"{name}: {why}" for name, why in self.refusals.items())
            self.close()
        return bool(best)

    def are_given_up(self, plan: Plan | None) -> bool:
        """Stop recomputing regions if the first plan with them is not faster or no plan is feasible (None)."""
        before = self.before.plan if self.before is not None and (self._is_new or plan is None) else None
        self._is_new = False
        if before is None or (plan is not None and plan.expected_seconds < before.expected_seconds):
            return False
        log.info("compiled parts are not recomputed: the plan that does so is not faster")
        self.before, self.reason = None, _NOT_WORTH_IT
        self.close()
        return True

    def _best(self, planned: PlannedStep, tried: Sequence[_Tried], device_bytes: int) -> frozenset[str]:
        assert planned.plan is not None
        # Cheapest first. Among equally cheap regions, the last of forward first: it has the least time to swap.
        order = sorted(
            tried, key=lambda row: (round(math.log(max(row.seconds, 1e-9) / row.saved_bytes, _RATIO)), -row.packed)
        )
        trace, best = planned.trace(), planned.plan.expected_seconds * (1 - self._limits.noise)
        chosen: frozenset[str] = frozenset()
        for count in sorted({math.ceil(len(order) * share / _CHOICES) for share in range(1, _CHOICES + 1)}):
            rows = order[:count]
            try:
                plan = wanted_plan(_without(trace, rows), planned.link, self._options, device_bytes, self._limits)
            except InfeasibleLimitError:
                continue
            if plan.expected_seconds < best:
                best, chosen = plan.expected_seconds, frozenset(row.name for row in rows)
        return chosen


def _is_within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _tensors_of(name: str, planned: PlannedStep) -> tuple[int, ...]:
    """Return the ids of the tensors of the trace that a region saves."""
    profile = planned.profile
    nodes, after = profile.trace.nodes, profile.order.node_after_pack
    return tuple(
        tensor
        for tensor, packs in profile.members.items()
        if all(index in after and _is_within(nodes[after[index]].name, name) for index in packs)
    )


def _row(name: str, planned: PlannedStep, input_bytes: int, seconds: float) -> _Tried:
    inside = set(_tensors_of(name, planned))
    tensors = [tensor for tensor in planned.profile.trace.tensors if tensor.id in inside]
    return _Tried(
        name,
        tuple(tensor.id for tensor in tensors),
        sum(tensor.bytes for tensor in tensors),
        input_bytes,
        seconds,
        min(tensor.packed for tensor in tensors),
        min(tensor.first_backward for tensor in tensors),
    )


def _without(trace: Trace, rows: Collection[_Tried]) -> Trace:
    """Return the trace of a step in which some regions save only their inputs and run again in backward."""
    recipes: dict[int, Recompute] = {}
    inputs: list[SavedTensor] = []
    size: Mapping[int, int] = {tensor.id: tensor.bytes for tensor in trace.tensors}
    number = max(size, default=0)
    for row in rows:
        for each in row.tensors:
            recipes[each] = Recompute(row.seconds * size[each] / row.saved_bytes, ())
        if row.input_bytes:
            number += 1
            packed, used = row.packed, row.used
            inputs.append(SavedTensor(number, row.input_bytes, packed, packed, packed, used, used))
    own = (replace(tensor, recompute=recipes.get(tensor.id)) for tensor in trace.tensors)
    return recomputed(replace(trace, tensors=(*own, *inputs)), recipes)
