"""Begins trial steps for the controller. A trial step measures how tensors can be recomputed.

It runs each recipe (the operators that recompute a tensor) once, or each compiled submodule ("region") twice. A trial
step is due if recomputation could improve the plan of a signature (the shapes and kinds of a step's inputs), or if
`offload plan train.py` or `offload fit` has requested one.
"""

from __future__ import annotations

import logging

from torch import nn

from offload.control.limits import Limits
from offload.control.phase import Phase, SignatureState
from offload.control.planned_step import PlannedStep
from offload.control.profile_listener import ProfileListener, tell_recipes
from offload.control.regions import CompiledRegions
from offload.control.trial import MakeTrial, Recipes, TimedTrial, TrialObserver, is_worth_a_trial
from offload.options import Options
from offload.runtime.counters import Counts
from offload.runtime.disturbance import disturb
from offload.runtime.engine import Engine
from offload.runtime.executor import StepObserver, SwapOnDemand

__all__ = ["Trials"]

log = logging.getLogger("offload")


class Trials:
    """Begins the trial steps of one model on one device.

    Parameters
    ----------
    make
        Begins a trial step that runs recipes. If none can run, returns the reason.
    regions
        The compiled submodules of the model.
    on_profile
        A listener that may request trial steps, and is called with the recipes that they find (`profile_listener.py`).
    """

    def __init__(
        self,
        options: Options,
        engine: Engine,
        counts: Counts,
        make: MakeTrial,
        regions: CompiledRegions,
        on_profile: ProfileListener | None,
        limits: Limits,
    ) -> None:
        self._options = options
        self._engine = engine
        self._counts = counts
        self._make = make
        self._regions = regions
        self._on_profile = on_profile
        self._limits = limits

    def begin_due(self, state: SignatureState, planned: PlannedStep, model: nn.Module) -> StepObserver | None:
        """Begin a trial step if the signature has had none and recomputation could improve its plan."""
        plan = planned.plan
        assert plan is not None
        has_had_one = planned.recipes is not None or planned.trial is not None
        if has_had_one or planned.search.is_settled or not is_worth_a_trial(plan, self._options, self._limits):
            return None
        if self._regions.chosen:
            planned.recipes = Recipes()
            return None
        order = planned.profile.order
        if order.compiled_nodes and self._regions.begin_trial(planned, model):
            return self._enter(state, planned, TimedTrial(self._engine, order, planned.trace(), 0))
        return self._begin(state, planned, self._options.memory_limit or plan.peak_bytes)

    def begin_requested(self, state: SignatureState, planned: PlannedStep) -> StepObserver:
        """Begin the requested trial step. If it has begun before or cannot run, swap on demand in this step.

        If the trial step has ended, pass its recipes to the listener; if it cannot run, the reason.
        """
        trial = self._begin(state, planned, planned.trial_bytes or 0) if planned.trial is None else None
        self.tell_recipes(planned)
        return trial or SwapOnDemand()

    def tell_recipes(self, planned: PlannedStep) -> None:
        """Pass the recipes of the requested trial step to the listener if it has ended; the reason if it cannot run."""
        tell_recipes(self._on_profile, planned, self._options, self._counts, self._engine.device)

    def _begin(self, state: SignatureState, planned: PlannedStep, room: int) -> StepObserver | None:
        trial = self._make(self._engine, planned.profile.order, planned.trace(), room)
        if isinstance(trial, str):
            planned.recipes = Recipes(reason=trial)
            log.info("nothing is recomputed: %s", trial)
            return None
        return self._enter(state, planned, trial)

    def _enter(self, state: SignatureState, planned: PlannedStep, trial: TrialObserver) -> StepObserver:
        disturb()
        planned.trial = trial
        self._counts.trial_steps += 1
        state.enter(Phase.TRIAL)
        return trial
