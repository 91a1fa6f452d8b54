"""The automatic mode: profiles each signature's first step, and plans the next ones.

It profiles again if a step saves other tensors, and plans again if durations differ from the plan. A signature is the
shapes and kinds of a step's inputs; each is in one of the phases of `phase.py`. At the start of each step the session
calls `observer`. The step's hooks report to the object that it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

from torch import nn

from offload.control.limits import LIMITS, Limits
from offload.control.own_copies import OwnCopies
from offload.control.peak_watch import PeakWatch
from offload.control.phase import Phase, SignatureState, SignatureStates
from offload.control.planned_step import PlannedStep
from offload.control.profile_listener import ProfileListener, tell_profile
from offload.control.promise import SlowdownPromise
from offload.control.regions import CompiledRegions
from offload.control.repeated_profile import compare_again, restore_profile
from offload.control.running_step import RunningStep
from offload.control.signature import Signature
from offload.control.state_plan import StatePlanner
from offload.control.trial import MakeTrial
from offload.control.trials import Trials
from offload.devices.allocator import LargeBlocks
from offload.options import Options, device_bytes
from offload.plan import InfeasibleLimitError, Link
from offload.profiling.model_state import HeldBefore, HeldBytes
from offload.profiling.profiler import Profiler
from offload.runtime.activations import MeteredExecutor
from offload.runtime.counters import Counts, StepRecord
from offload.runtime.engine import Engine
from offload.runtime.executor import ScheduleExecutor, StepObserver, SwapOnDemand
from offload.runtime.schedule import Schedule, StepOrder
from offload.runtime.weak import weak_callback

__all__ = ["PlanController"]

_STEADY = Phase.STEADY, Phase.UNHOOKED
_MORE_HELD = "more memory is in use before the step than the plan assumes"


class PlanController:
    """Chooses what each step does: profile, try recomputation, follow a plan, or swap every tensor on demand.

    With `n_tensors` and ``lb="auto"``, the longest-lived tensors are swapped; the planner chooses when to copy them.

    Parameters
    ----------
    on_recorded
        Called with the recorded packs and unpacks of each profiled step.
    measure_link
        Measures the speed of copies. Its argument limits the device memory that it uses, in bytes.
        Called after each profiled step until the speed of the engine's own copies is known.
    held
        Returns the bytes of model, gradients and optimizers before a step, and how many of them are not on the device.
    make_trial
        Begins a trial step, which runs each recipe once and compares the bits; or returns why no trial can run.
    regions
        The compiled submodules of the model.
    on_profile
        Called with every profile before it is planned.
    plan_state
        Called for each plan; None if no optimizer state can move. Chooses which state does, and adds to the error of an
        infeasible limit how much memory it takes, and how much of that can be freed.
    """

    def __init__(
        self,
        options: Options,
        engine: Engine,
        counts: Counts,
        on_recorded: Callable[[StepOrder], None],
        measure_link: Callable[[int], Link],
        held: HeldBefore,
        make_trial: MakeTrial,
        regions: CompiledRegions,
        on_profile: ProfileListener | None = None,
        limits: Limits = LIMITS,
        plan_state: StatePlanner | None = None,
    ) -> None:
        self._limits = limits = replace(limits, min_tensor_bytes=options.min_tensor_bytes)
        self._options = options
        self._engine = engine
        self._on_cpu = engine.device.type == "cpu"
        self._counts = counts
        self._on_recorded = on_recorded
        self._measure_link = measure_link
        self._held = held
        self._trials = Trials(options, engine, counts, make_trial, regions, on_profile, limits)
        self.regions = regions
        self._on_profile = on_profile
        self._copies = OwnCopies(engine)
        self._promise = SlowdownPromise(options, limits, engine, self._copies, plan_state)
        self._link: Link | None = None  # the last measurement
        self._blocks = LargeBlocks()
        self.states = SignatureStates()
        self._peaks = PeakWatch(engine.device, options.memory_limit, limits)
        self._return_blocks()
        self._latest: PlannedStep | None = None
        self.running = RunningStep()
        self._lock = threading.RLock()
        # A weak callback: a strong one would be a reference cycle, which keeps the engine until garbage collection.
        self._forget = weak_callback(self.forget)

    # -- the beginning of a step --------------------------------------------------------------------------------------

    def observer(self, signature: object, model: nn.Module) -> StepObserver:
        """Return the observer of the step that begins: a profiler, an executor of a plan, a trial, or `SwapOnDemand`.

        Raises
        ------
        InfeasibleLimitError
            No plan keeps the memory limit; nothing has run yet.
        """
        with self._lock:
            self.running.end()
            self._promise.end_reference()
            self.regions.end_trial()
            self.end_finished_profiles()
            self._read_profiles()
            for profiler in self.states.profilers():
                profiler.is_alone &= profiler.finished
            held = partial(self._held_before, signature)  # called only if needed: it visits hundreds of tensors
            state = self.states.use(signature, self._limits.signatures)
            if self._peaks.has_grown():
                self.states.doubt()
            planned = state.planned
            lender = None if planned else self.states.lender(signature, self._limits.borrow_from)
            if lender is not None:
                return self._borrow(state, signature, lender, model, held)
            if planned is None or planned.is_incomplete:
                return self._record(state, model, held())
            if planned.trial is not None and not planned.trial.is_as_recorded:
                self.regions.repeat_trial(planned)
                self.forget(signature)
                return self._record(state, model, held())
            if planned.trial_bytes is not None:
                return self._trials.begin_requested(state, planned)
            if self.regions.choose(planned, partial(device_bytes, self._engine.device)):
                return self._record_anew(state, signature, model, held())
            self._judge(state, planned, held)
            if state.phase is Phase.PLANNING:
                try:
                    self._plan(planned, held())
                except InfeasibleLimitError:
                    if not self.regions.are_given_up(None):
                        raise
                    return self._record_anew(state, signature, model, held())
                if self.regions.are_given_up(planned.plan):
                    return self._record_anew(state, signature, model, held())
                state.enter(Phase.MEASURING)
            due = None if planned.plan_steps else self._trials.begin_due(state, planned, model)
            return due or self._follow(signature, state, planned)

    def needs_hooks(self, signature: object) -> bool:
        """Return False if steps need no hooks and enough of them have been measured.

        Even then one step in `recheck_steps` needs them. With a limit every step does: deviations are noticed at once.
        """
        with self._lock:
            state = self.states.get(signature)
            if state is None or state.planned is None or state.phase is not Phase.UNHOOKED:
                return True
            return state.planned.steps % self._limits.recheck_steps == 0

    def _record(self, state: SignatureState, model: nn.Module, held: HeldBytes) -> StepObserver:
        """Profile this step. Swap on demand instead if an earlier one awaits backward, or if many steps deviated."""
        for profiler in self.states.profilers():
            profiler.rounds_since += 1
            if profiler.rounds_since > self._limits.pending_steps:
                profiler.stop()  # its backward is no longer expected
        is_pending = state.profiler is not None and state.profiler.rounds_since <= self._limits.pending_steps
        if is_pending or state.phase is Phase.ON_DEMAND:
            return SwapOnDemand()
        state.enter(Phase.PROFILING)
        self._counts.profiled_steps += 1
        self._promise.end_overlap()
        state.profiler = Profiler(self._engine, model, held)
        return state.profiler

    def _record_anew(self, state: SignatureState, signature: object, model: nn.Module, held: HeldBytes) -> StepObserver:
        """Discard all profiles and profile this step: the set of compiled submodules to recompute has changed."""
        self.end_profiles()
        self.states = SignatureStates({signature: state})
        state.planned = state.doubted = state.profiler = None
        return self._record(state, model, held)

    def _judge(self, state: SignatureState, planned: PlannedStep, held: HeldBefore) -> None:
        """Change the phase if measurements, a trial, memory in use or an optimizer's first update require it."""
        limit_bytes = self._options.memory_limit
        is_outdated = self._promise.is_outdated(planned)
        is_steady = state.phase in _STEADY
        has_news = bool(planned.executors) or planned.is_unjudged or is_outdated or not is_steady
        if has_news:
            planned.read_measurements(self._counts)
            if planned.read_trial(self._counts, cheap=self._options.recompute == "cheap"):
                planned.link = self._promise.own_link(planned.link)
            planned.is_unjudged = False
        if planned.plan is None:
            state.enter(Phase.PLANNING)
        elif limit_bytes is not None and planned.exceeds(limit_bytes, held()):
            state.enter(Phase.PLANNING, _MORE_HELD)
        elif not has_news:
            return
        elif is_outdated:
            state.enter(Phase.PLANNING, "an optimizer has made its first update")
        elif state.phase is Phase.TRIAL:
            if planned.trial is None:
                state.enter(Phase.PLANNING, "the trial step is over")
        elif self._promise.needs_plan(planned):
            state.enter(Phase.PLANNING, "measured steps differ from the plan")
        elif limit_bytes is not None and planned.exceeds(limit_bytes, held()):  # an earlier plan is followed again
            state.enter(Phase.PLANNING, _MORE_HELD)
        elif self._promise.is_open(planned):
            state.enter(Phase.MEASURING)
        elif planned.is_measured or not self._measures(state, planned):
            self._promise.release_pinned()
            state.enter(Phase.STEADY if self._promise.needs_hooks(planned) else Phase.UNHOOKED)
        if is_steady != (state.phase in _STEADY):
            self._return_blocks()  # the steps may follow another plan now

    def _follow(self, signature: object, state: SignatureState, planned: PlannedStep) -> StepObserver:
        planned.steps += 1
        self._latest = planned
        is_reference = self._promise.begin_reference(planned, self._counts)
        self._counts.settled_steps += not is_reference and state.phase in _STEADY
        if planned.plan_steps > 1:  # a plan's first step may need more than the steps of the plan before it
            self._peaks.begin()
        about = self._about(signature, self._promise.reference_schedule(planned) if is_reference else planned.schedule)
        if not is_reference and (planned.is_behind or not self._measures(state, planned)):
            self._counts.unmeasured_steps += 1
            executor = ScheduleExecutor(*about)
            if state.phase is Phase.STEADY:  # in a search, these copies would count as a cost of the plan
                self._promise.let_overlap(planned, executor)
            return self.running.follows(executor, planned.plan)
        assert planned.weights is not None
        metered = MeteredExecutor(*about, self._promise.start_stopwatch(about[0]), planned.weights)
        planned.remember(metered)
        return self.running.follows(metered, about[0].plan, keeps_all=is_reference and not about[0].is_serial)

    def _about(
        self, signature: object, schedule: Schedule | None
    ) -> tuple[Schedule, Engine, Counts, str, Callable[[], None]]:
        assert schedule is not None  # a plan has been made
        return schedule, self._engine, self._counts, "kept by plan", partial(self._forget, signature)

    def _measures(self, state: SignatureState, planned: PlannedStep) -> bool:
        steady = self._limits.steady_measured_every if self._on_cpu else self._limits.device_measured_every
        every = {Phase.STEADY: steady, Phase.UNHOOKED: self._limits.recheck_steps}
        return planned.steps % every.get(state.phase, 1) == 0

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, planned: PlannedStep, held: HeldBytes) -> None:
        limit_bytes = self._options.memory_limit
        if limit_bytes is not None and planned.exceeds(limit_bytes, held):
            planned.restart_search()
        planned.held = planned.plan_held.raised_to(held)
        try:
            plan = self._promise.plan(planned)
        except InfeasibleLimitError as error:
            if restore_profile(planned, error):
                return
            planned.refusal = copy(error)  # without its traceback, whose frames hold tensors
            raise
        planned.follow(plan, limit_bytes)
        self._latest = planned
        self._return_blocks()

    def _return_blocks(self) -> None:
        """Make malloc return freed large blocks at once on the CPU if memory is limited and a plan may move tensors."""
        plans = [state.planned.plan for state in self.states.values() if state.planned is not None]
        moves = not plans or any(plan is None or plan.swaps or plan.recomputes for plan in plans)
        is_limited = self._options.memory_limit is not None or self._options.least_memory
        self._blocks.return_at_once(wanted=self._on_cpu and is_limited and moves)

    def close(self) -> None:
        """Stop recording, and restore malloc's settings."""
        self.end_profiles()
        self._blocks.return_at_once(wanted=False)

    def _borrow(
        self, state: SignatureState, signature: object, lender: SignatureState, model: nn.Module, held: HeldBefore
    ) -> StepObserver:
        limit_bytes, larger = self._options.memory_limit, lender.planned
        assert larger is not None
        exceeds = limit_bytes is not None and larger.plan is not None and larger.exceeds(limit_bytes, held())
        if larger.plan is None or lender.phase is Phase.PLANNING or exceeds:
            try:
                self._plan(larger, held())
                lender.enter(Phase.MEASURING)
            except InfeasibleLimitError:  # the larger step has no plan within the limit; this step may have one
                if self.regions.are_given_up(None):
                    return self._record_anew(state, signature, model, held())
                return self._record(state, model, held())
        else:
            self._peaks.begin()
        self._counts.borrowed_steps += 1
        self._counts.unmeasured_steps += 1
        assert larger.schedule is not None
        return ScheduleExecutor(*self._about(signature, larger.schedule.for_smaller_steps))

    def _held_before(self, signature: object) -> HeldBytes:
        held = self._held()
        if self._on_cpu and isinstance(signature, Signature):
            return replace(held, state=held.state + signature.input_bytes)
        return held

    # -- profiles -----------------------------------------------------------------------------------------------------

    def forget(self, signature: object) -> None:
        """Count a deviation and discard the plan. The next step is profiled, unless `limits.deviations` is reached."""
        with self._lock:
            self._peaks.cancel()
            self.states.use(signature, self._limits.signatures).deviate(self._limits.deviations)

    def end_finished_profiles(self) -> None:
        """Stop the profilers of steps that are over, and of those whose graph was freed without a backward pass."""
        self._peaks.end()
        for profiler in self.states.profilers():
            if profiler.finished or profiler.is_lost:
                profiler.stop()

    def end_profiles(self) -> None:
        """Stop all profilers, even those of steps that have not ended."""
        self._peaks.end()
        for profiler in self.states.profilers():
            profiler.stop()

    def _read_profiles(self) -> None:
        for signature, state in list(self.states.items()):
            if state.profiler is not None:
                self._read_profile(signature, state, state.profiler)

    def _read_profile(self, signature: object, state: SignatureState, profiler: Profiler) -> None:
        profile = profiler.profile()
        if profile is None:
            return  # its backward has not ended
        state.profiler = None
        self._on_recorded(profile.order)
        if compare_again(state, profile, profiler, self._options, self._limits):
            return
        measured = profiler.stopwatch.measured(profile.order.node_count)
        if self._link is not None and self._copies.are_known:
            link = self._copies.link(self._link)
        else:
            room_bytes = profile.room_bytes(self._options.memory_limit, self._held_before(signature))
            self._link = link = self._measure_link(room_bytes)
        if measured is not None:
            self._counts.steps_measured.append(StepRecord(True, None, measured.step_seconds, measured.stall_seconds))
            if profile.trace.tensors:
                swap_seconds = measured.hook_seconds / len(profile.trace.tensors)
                link = replace(link, swap_seconds=min(swap_seconds, self._limits.swap_seconds_max))
        earlier = state.planned.incomplete_profiles if state.planned is not None else 0
        is_complete = profile.knows_temporaries and not profiler.stopwatch.is_disturbed
        held = profile.held
        if self._on_profile is not None:  # `tell_profile` reads `planned.held` now; `_plan` updates it only later
            held = held.raised_to(self._held_before(signature))
        planned = PlannedStep(self._limits, profile, link, held, signature, 0 if is_complete else earlier + 1)
        self._latest = state.planned = planned
        state.enter(Phase.PLANNING)
        tell_profile(self._on_profile, planned, self._options, self._engine.device)

    # -- queries ------------------------------------------------------------------------------------------------------

    def latest(self) -> PlannedStep | None:
        """Read all complete measurements. Return the `PlannedStep` that was made, planned or followed last."""
        with self._lock:
            self.end_finished_profiles()
            self._read_profiles()
            for state in self.states.values():
                if state.planned is not None:
                    state.planned.read_measurements(self._counts)
                    self._trials.tell_recipes(state.planned)
            return self._latest

    @property
    def main(self) -> PlannedStep | None:
        """The `PlannedStep` with the largest number of steps; in a tie, the one used last."""
        with self._lock:
            return self.states.main()

    @property
    def why_nothing_recomputed(self) -> str:
        """Why no trial step could run for `main`, or why no compiled submodule is recomputed; empty otherwise."""
        recipes = planned.recipes if (planned := self.main) is not None else None
        return (recipes.reason if recipes is not None else "") or self.regions.reason
