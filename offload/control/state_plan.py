"""Chooses for each plan which optimizer state is swapped out between updates, and when, and makes the optimizers do so.

`SlowdownPromise` makes every plan through it. Only with ``optimizer_state="auto"`` and a memory limit it chooses which
state moves. Without ``"auto"``, the error for a limit that no plan keeps says how much memory ``"auto"`` would free.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from offload.control.limits import Limits
from offload.control.planned_step import KnownOverlap, PlannedStep
from offload.control.refusal import GradientKnob, explained
from offload.optimizer_state import mover
from offload.optimizer_state.divisible import why_it_stays
from offload.optimizer_state.gradient_mover import why_all_gradients_stay
from offload.optimizer_state.in_backward import is_known_to_step_in_backward
from offload.optimizer_state.movable import MovableChunk
from offload.optimizer_state.movers import StateMovers
from offload.optimizer_state.state_tensor import largest_state_bytes
from offload.optimizer_state.update_room import TEMPORARIES_MOST
from offload.options import Options
from offload.parameters.mover import copied_bytes_max
from offload.plan import (
    InfeasibleLimitError,
    Plan,
    StateChunk,
    StateOverlap,
    Update,
    fastest_share,
    state_overlap,
    unswapped_bytes,
)
from offload.plan.cycle import between_bytes
from offload.plan.trace import Trace
from offload.profiling.model_state import HeldMemory
from offload.runtime.counters import Counts
from offload.runtime.executor import ScheduleExecutor
from offload.runtime.weak import WeakReferences

__all__ = ["StatePlanner"]

log = logging.getLogger("offload")


class StatePlanner:
    """Chooses which share of the optimizer state each plan swaps out: at least as much as any other plan in use.

    Parameters
    ----------
    states
        The model's optimizers.
    options
        The caller's arguments.
    limits
        Tolerances. More state than the limit requires is swapped out only if steps are then faster by over `noise`.
    counts
        The session's counts, which give the number of steps.
    latest
        Reads complete profiles, and returns the `PlannedStep` used last.
    held
        Knows the model's optimizers and the bytes of their state.
    """

    def __init__(
        self,
        states: StateMovers,
        options: Options,
        limits: Limits,
        counts: Counts,
        latest: Callable[[], PlannedStep | None],
        held: HeldMemory,
    ) -> None:
        self._states = states
        self._options = options
        self._limits = limits
        self._counts = counts
        self._latest = latest
        self._held = held
        self._planned: WeakReferences[PlannedStep] = WeakReferences()
        states.has_room = partial(_has_room, weakref.ref(self))
        states.passes.count = partial(getattr, counts, "steps")

    def plan(self, planned: PlannedStep, make: Callable[[Trace], Plan]) -> Plan:
        """Return a signature's next plan, and swap out the optimizer state that the plan chooses.

        Parameters
        ----------
        planned
            The signature.
        make
            Returns a plan of forward and backward for a trace.

        Raises
        ------
        InfeasibleLimitError
            No plan keeps the memory limit, even if all movable state is swapped out.
        """
        chunks: list[MovableChunk] = []
        if self._states.is_planned:
            self._states.settle()
            chunks = self._states.chunks()
            if not chunks and self._states.updates:  # no state can be swapped out
                self._states.follow(())
            planned.optimizers = self._states.passes.optimizers
        try:
            return self._with_state(planned, make, chunks) if chunks else make(planned.trace())
        except InfeasibleLimitError as error:
            raise self._explained(error, planned, chunks) from None

    def let_overlap(self, planned: PlannedStep, executor: ScheduleExecutor) -> None:
        """Let state be written in forward and read in backward of the step that begins, where its plan leaves room."""
        overlap = self.overlap(planned)
        if overlap is not None:
            self._states.in_passes.follow(overlap, executor)

    def end_overlap(self) -> None:
        """Wait until as few bytes are being written as without overlap."""
        self._states.in_passes.end()

    def overlap(self, planned: PlannedStep) -> StateOverlap | None:
        """Return when state is copied in steps that follow the signature's plan; None if in the update only."""
        plan, kinds, known = planned.plan, self._states.kinds, planned.overlap
        assert plan is not None
        if known is None or known.plan is not plan or known.kinds != kinds:
            known = planned.overlap = KnownOverlap(plan, kinds, self._made_overlap(planned, plan))
        return known.overlap

    def _made_overlap(self, planned: PlannedStep, plan: Plan) -> StateOverlap | None:
        states, limits = self._states, self._limits
        if states.steps_in_backward or states.gradient_counts or states.steps_whole:
            return None
        chunks = states.chunks()
        update, moved = self._update(chunks), frozenset(i for i, chunk in enumerate(chunks) if chunk.is_moved)
        if plan.state is not None:
            update, moved, counted_bytes = plan.state.update, plan.state.moved, plan.state.between_bytes
        else:
            moved_bytes = update.bytes_of(moved)
            counted_bytes = update.bytes - moved_bytes + min(moved_bytes, states.bytes_in_memory_max())
        held = self._held.look()
        held_bytes = max(0, held.state - update.bytes) + max(held.gradients, planned.gradients_in_update)
        held_bytes += TEMPORARIES_MOST * max((chunk.param_bytes for chunk in chunks), default=0)
        if len(states.counts) > 1:  # while one optimizer steps, state of another may be read ahead
            held_bytes += mover.CHUNK_BYTES + mover.AHEAD_BYTES + mover.BEHIND_BYTES
        moves = plan.swaps or plan.recomputes or self._options.memory_limit is not None
        noise = limits.noise if moves else limits.hooks_share
        found = state_overlap(plan, update, moved, counted_bytes, held_bytes, noise=noise)
        if found is not None:
            log.info("%s", found)
        return found

    def is_outdated(self, planned: PlannedStep) -> bool:
        """Return whether an optimizer with movable state has made its first update since the plan was made.

        False if the plan was made after another optimizer's update and already chooses the state to swap out.
        """
        assert planned.plan is not None
        known, planned.optimizers = planned.optimizers, self._states.passes.optimizers
        if not self._states.is_planned or known == planned.optimizers or (known and planned.plan.state is not None):
            return False
        return bool(self._states.chunks())

    def _with_state(self, planned: PlannedStep, make: Callable[[Trace], Plan], chunks: Sequence[MovableChunk]) -> Plan:
        limit_bytes = self._options.memory_limit
        assert limit_bytes is not None
        update = self._update(chunks)
        plan = fastest_share(
            planned.trace(away_bytes=0),
            planned.link,
            limit_bytes,
            update,
            self._held_in_update(planned, update),
            make,
            least=min(len(chunks), self._moved_by_others(planned)),
            noise=self._limits.noise,
            smallest=self._options.max_slowdown is not None,
        )
        assert plan.state is not None
        planned.held = replace(planned.held, away=plan.state.freed_bytes)
        if all(each is not planned for each in self._planned):
            self._planned.add(planned)
        self._states.follow(param for i in plan.state.moved for param in chunks[i].params)
        return plan

    def _update(self, chunks: Sequence[MovableChunk]) -> Update:
        return Update(
            tuple(StateChunk(each.nbytes, each.seconds, each.name) for each in chunks),
            ahead_bytes=mover.AHEAD_BYTES,
            behind_bytes=mover.BEHIND_BYTES,
            micro_batches=self._states.micro_batches,
        )

    def _explained(
        self, error: InfeasibleLimitError, planned: PlannedStep, chunks: Sequence[MovableChunk]
    ) -> InfeasibleLimitError:
        kept, (away, _) = self._held.optimizer_bytes(), self._states.away_bytes()
        if chunks:  # in the refused plan all of them leave
            update = self._update(chunks)
            kept += away - update.bytes + between_bytes(update, range(len(chunks)))
        else:
            kept += min(away, self._states.bytes_in_memory_max())
        frozen_bytes, parameter_bytes = self._held.parameter_bytes(self._options.min_tensor_bytes)
        movable = 0
        if not (self._states.is_planned or self._states.steps_in_backward or away):
            movable = self._states.movable_bytes(self._held.optimizers)
        return explained(
            error,
            planned,
            self._options,
            self._counts,
            optimizer_bytes=max(0, kept),
            movable_bytes=max(0, movable - mover.BEHIND_BYTES),
            window_bytes=min(movable, mover.CHUNK_BYTES + mover.AHEAD_BYTES),
            frozen_bytes=frozen_bytes,
            parameter_bytes=parameter_bytes,
            copied_bytes=sum(copied_bytes_max(self._options.memory_limit)),
            moved_parameter_bytes=self._held.moved_parameter_bytes,
            for_gradients=self._for_gradients(),
            lacks_optimizer=not self._held.optimizers,
        )

    def _for_gradients(self) -> list[GradientKnob]:
        """Return the arguments that would free gradients; none if one of them is in use.

        None too if an optimizer is not one of torch's: it would have to be tried first.
        """
        states, optimizers = self._states, self._held.optimizers
        if states.steps_in_backward or states.gradient_counts or why_all_gradients_stay():
            return []
        if not all(map(is_known_to_step_in_backward, optimizers)):
            return []
        found = []
        moves_all = bool(states.counts) and not states.is_planned
        stays = [each.stays for each in states.counts] if states.counts else map(why_it_stays, optimizers)
        if all(why in ("", mover.STAYS_BY_PLAN) for why in stays):
            name = "gradients=True" if moves_all else "gradients=True with optimizer_state=True"
            nbytes_max = self._held.gradient_bytes_max(self._options.min_tensor_bytes)
            text = f"{name} lets gradients leave memory in backward"
            found.append(GradientKnob(text, nbytes_max, writing_bytes=mover.BEHIND_BYTES))
        if optimizers and states.micro_batches == 1:  # of optimizers whose state stays, this is not known
            name = "step_in_backward=True with optimizer_state=True" if states.is_planned else "step_in_backward=True"
            largest = max(map(largest_state_bytes, optimizers)) if states.counts else 0
            ahead_bytes = mover.AHEAD_BYTES + largest if largest else 0
            text = f"{name} updates parameters in backward and frees their gradients (one backward pass per step)"
            found.append(GradientKnob(text, self._held.gradient_bytes_max(0), ahead_bytes=ahead_bytes))
        return found

    def has_room(self, nbytes: int) -> bool:
        """Return whether the recorded step, if it swaps nothing, leaves `nbytes` free within the limit."""
        planned, limit_bytes = self._latest(), self._options.memory_limit
        return (
            planned is not None
            and limit_bytes is not None
            and max(unswapped_bytes(planned.trace()), default=limit_bytes) + nbytes <= limit_bytes
        )

    def _moved_by_others(self, planned: PlannedStep) -> int:
        others = [each.plan for each in self._planned if each is not planned]
        return max((len(plan.state.moved) for plan in others if plan is not None and plan.state is not None), default=0)

    @staticmethod
    def _held_in_update(planned: PlannedStep, update: Update) -> int:
        return max(0, planned.held.state - update.bytes) + planned.gradients_in_update


def _has_room(planner: weakref.ref[StatePlanner], nbytes: int) -> bool:
    found = planner()
    return found is not None and found.has_room(nbytes)
