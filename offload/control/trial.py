"""The trial step: decides when it is due, times its nodes, and converts its recipes for the planner.

This module maps the storages of `offload.recomputation`, numbered by pack, to the planner's tensors, which have ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from statistics import median
from typing import Protocol

from offload.control.limits import Limits
from offload.options import Options
from offload.plan import Plan, least_feasible_limit
from offload.plan.trace import Recompute, Trace
from offload.profiling.recipe_trial import RecipeTrial
from offload.recomputation.measured import MeasuredRecipe
from offload.runtime.engine import Engine
from offload.runtime.executor import Measured, StepObserver, Stopwatch
from offload.runtime.hooks import innermost_step_hooks
from offload.runtime.schedule import StepOrder
from offload.torch_compat.backward_pass import current_node

__all__ = ["MakeTrial", "Recipes", "TimedTrial", "TrialObserver", "is_worth_a_trial", "make_trial", "recipes_of"]

_HEAVY = 'it takes a matrix product, a convolution or attention, and recompute="cheap" leaves those out'
_UNKNOWN = "the trial step did not record how it is computed"
_CIRCLE = "its recipe depends on itself"


class TrialObserver(StepObserver, Protocol):
    """Records one step, runs each recipe once and compares the result bit for bit."""

    @property
    def finished(self) -> bool:
        """Whether all recipes have been tried, and the device has reached the end of backward if the host has."""

    @property
    def is_as_recorded(self) -> bool:
        """Whether the step saved the same tensors as the recorded one."""

    def recipes(self) -> Mapping[int, MeasuredRecipe]:
        """Return the recipes whose results were bit-identical, by pack index of the entry."""

    def refusals(self) -> Mapping[int, str]:
        """Return why other entries have no recipe, by pack index."""

    def measured(self, node_count: int) -> Measured | None:
        """Return the measured durations of the step, with its first `node_count` nodes; None if it has not ended."""


# Starts the trial step of a recorded step. Arguments: engine, recorded order, trace, and the most bytes that the trial
# may use. If no trial can run, the result is a string that says why.
MakeTrial = Callable[[Engine, StepOrder, Trace, int], TrialObserver | str]


class TimedTrial(RecipeTrial):
    """A trial step whose nodes are timed."""

    def __init__(self, engine: Engine, order: StepOrder, trace: Trace, limit_bytes: int) -> None:
        super().__init__(engine, order, trace.base_bytes, limit_bytes, _unpacked_bytes(trace))
        self._stopwatch = Stopwatch(engine)
        self._node_after_pack = order.node_after_pack
        self._node_of_use: dict[int, int] = {}
        for node, pack_index in order.uses:
            self._node_of_use.setdefault(pack_index, node)
        self._node: int | None = 0
        hooks = innermost_step_hooks()
        self._hooks = weakref.ref(hooks) if hooks is not None else None

    @property
    def finished(self) -> bool:
        """Whether all recipes have been tried, and the device has reached the end of backward.

        Backward may refuse recipes. None is awaited if the step's graph has been freed: its nodes hold the hooks.
        """
        is_lost = self._hooks is not None and self._hooks() is None
        return super().finished and (self.measured(1) is not None if self._stopwatch.finished else is_lost)

    def watches(self, pack_index: int) -> bool:
        """Return True: a backward node may begin with the unpack of a kept tensor."""
        return True

    def begin(self) -> None:
        """Start the time of a hook."""
        self._stopwatch.begin()

    def packed(self, pack_index: int) -> None:
        """End the time of the hook of this pack. The node after it begins, as in the recorded step."""
        self._arrive(self._node_after_pack.get(pack_index))
        self._stopwatch.end(None)

    def unpacking(self, pack_index: int) -> None:
        """Start the time of the hook in which backward asks for the tensor of this pack."""
        self._stopwatch.begin()
        super().unpacking(pack_index)
        self._stopwatch.listen_for_the_end()
        if current_node() is not None:  # otherwise code outside of backward reads grad_fn's attributes
            self._arrive(self._node_of_use.get(pack_index))

    def unpacked(self, pack_index: int) -> None:
        """End the time of the hook: the tensor of this pack is on the device."""
        self._stopwatch.end(pack_index)

    def measured(self, node_count: int) -> Measured | None:
        """Return the measured durations of the step, with its first `node_count` nodes; None if it has not ended."""
        return self._stopwatch.measured(node_count)

    def _arrive(self, node: int | None) -> None:
        if node is not None and node != self._node:
            self._node = node
            self._stopwatch.arrive(node)


def _unpacked_bytes(trace: Trace) -> list[int]:
    """Return, by node, the bytes of the tensors that exist when it ends and are packed later."""
    found = [0] * len(trace.nodes)
    for tensor in trace.tensors:
        for node in range(tensor.produced, tensor.packed):
            found[node] += tensor.bytes
    return found


def make_trial(engine: Engine, order: StepOrder, trace: Trace, limit_bytes: int) -> TrialObserver | str:
    """Begin a trial step. Returns its observer; if no trial can run, a string that says why."""
    if order.compiled_nodes:
        return "torch.compile made a part of the step"
    return TimedTrial(engine, order, trace, limit_bytes)


@dataclass(frozen=True)
class Recipes:
    """The results of a trial step.

    Attributes
    ----------
    recompute
        How tensors are recomputed, by their id in the trace.
    measured
        The recipes of the entries, as measured in the trial step, by pack index.
    entries
        Pack indices of the entries of each tensor in `recompute`, by tensor id.
    refusals
        Why other tensors have no recipe, by tensor id.
    reason
        Why no trial could run; empty if one has run.
    """

    recompute: Mapping[int, Recompute] = field(default_factory=dict)
    measured: Mapping[int, MeasuredRecipe] = field(default_factory=dict)
    entries: Mapping[int, Sequence[int]] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    reason: str = ""

    def held_bytes(self, tensors: Iterable[int]) -> int:
        """Return the bytes that the recipes of some tensors keep on the device until backward.

        These are small tensors and copies of parameters. The trace does not contain them, so the limit of the plan is
        lowered by these bytes.
        """
        chosen = {entry for tensor in tensors for entry in self.entries.get(tensor, ())}
        return sum(self.measured[entry].held_bytes for entry in chosen)

    def seconds_of(self, plan: Plan) -> float:
        """Return how long the recomputations of a plan took in the trial step, in seconds."""
        return sum(self.recompute[row.id].seconds for row in plan.recomputes)

    def added_to(
        self, trace: Trace, factors: Mapping[int, float], hook_seconds: float = 0.0, byte_seconds: float = 0.0
    ) -> Trace:
        """Return the trace with the recipes of its tensors.

        Parameters
        ----------
        factors
            Duration of recomputation divided by its duration in the trial step, by tensor id. The median of these is
            used for other tensors.
        hook_seconds
            Time in hooks per dropped tensor, which is added to each recipe.
        byte_seconds
            Seconds by which each dropped byte slows the computation.
        """
        if not self.recompute:
            return trace
        rows = dict(self.recompute)
        usual = median(factors.values()) if factors else 1.0
        size = {tensor.id: tensor.bytes for tensor in trace.tensors}
        for tensor_id, row in self.recompute.items():
            besides = hook_seconds + byte_seconds * size[tensor_id]
            rows[tensor_id] = replace(row, seconds=factors.get(tensor_id, usual) * row.seconds + besides)
        tensors = (replace(tensor, recompute=rows.get(tensor.id)) for tensor in trace.tensors)
        return replace(trace, tensors=tuple(tensors))


def is_worth_a_trial(plan: Plan, options: Options, limits: Limits) -> bool:
    """Return whether recomputation could improve a swap-only plan.

    With `max_slowdown`, it could if the plan swaps, or needs over 1 % more memory than the lowest feasible limit. (Also
    if the plan stays within `max_slowdown`: the durations of the recorded step are too long, so its steps may be slower
    than predicted, and plans with other peaks follow.)
    """
    if options.recompute is None or options.n_tensors is not None or not plan.trace.tensors:
        return False
    if options.max_slowdown is None:
        return plan.expected_seconds > (1 + limits.noise) * plan.compute_seconds
    return bool(plan.swaps) or plan.peak_bytes > (1 + limits.noise) * least_feasible_limit(plan.trace)


def recipes_of(trial: TrialObserver, members: Mapping[int, Sequence[int]], *, cheap: bool) -> Recipes:
    """Convert the results of a finished trial to recipes of a trace's tensors.

    Parameters
    ----------
    trial
        The finished trial.
    members
        Pack indices of the entries that make up each tensor, by its id.
    cheap
        Whether to leave out recipes with matrix products, convolutions or attention.
    """
    found, refused = trial.recipes(), trial.refusals()
    owner = {index: tensor for tensor, indices in members.items() for index in indices}
    recompute: dict[int, Recompute] = {}
    refusals: dict[int, str] = {}
    for tensor, indices in members.items():
        missing = [index for index in indices if index not in found]
        rows = [found[index] for index in indices if index in found]
        if missing:
            refusals[tensor] = next((refused[index] for index in missing if index in refused), _UNKNOWN)
        elif cheap and any(row.is_heavy for row in rows):
            refusals[tensor] = _HEAVY
        else:
            # A source without an owner is not a tensor of the trace: other code holds it, and it stays resident.
            sources = {owner[index] for row in rows for index in row.sources if index in owner} - {tensor}
            seconds = sum(row.seconds for row in rows)
            recompute[tensor] = Recompute(seconds, tuple(sorted(sources)), max(row.workspace_bytes for row in rows))
    for tensor in _in_circles(recompute):
        del recompute[tensor]
        refusals[tensor] = _CIRCLE
    entries = {tensor: members[tensor] for tensor in recompute}
    return Recipes(recompute, found, entries, refusals)


def _in_circles(recompute: Mapping[int, Recompute]) -> list[int]:
    """Return tensors whose recipes are to be removed so that no recipe depends on itself.

    A cycle is possible because a tensor has several entries: one may be a source of another tensor, another its result.
    """
    left = {tensor: recipe.inputs for tensor, recipe in recompute.items()}
    found = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            found.append(max(error.args[1]))
            del left[found[-1]]
        else:
            return found
