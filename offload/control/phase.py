"""The state machine of a signature: profile its first step, plan, measure the plan, then only follow it.

A signature is the kind of a step: the shapes and dtypes of its inputs (`signature.py`). The controller changes its
phase, always through `SignatureState.enter`.

    PROFILING ──▶ PLANNING ──▶ MEASURING ──▶ STEADY, or UNHOOKED if the plan moves nothing and there is no memory limit
        ▲          ▲  │  ▲         │            │
        │      TRIAL ◀┘  └─────────┴────────────┘   if measured steps differ from the plan, or more memory is in use
        └── from any phase, if a step differs from the recorded one; if this happens too often, to ON_DEMAND

If a swap-only plan slows the step (with `max_slowdown`: if it needs more memory than the lowest feasible limit), a
trial step follows. It tries which tensors can be recomputed, and the next plan may recompute them.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from offload.control.planned_step import PlannedStep
from offload.profiling.profiler import Profiler

__all__ = ["Phase", "SignatureState"]

log = logging.getLogger("offload")


class Phase(enum.Enum):
    """The phases of a signature: the kind of steps that it runs."""

    # One step is recorded. Steps that begin before its backward has ended swap every tensor and load it on demand.
    PROFILING = "profiling"
    PLANNING = "planning"  # a profile exists; a new plan is made before the next step
    TRIAL = "trial"  # one step runs every recipe once; steps that begin before it has ended follow the plan
    MEASURING = "measuring"  # the first steps of a plan are measured
    STEADY = "steady"  # measurements agree with the plan, or the limit on new plans is reached
    UNHOOKED = "unhooked"  # the plan neither swaps nor recomputes: only one step in `recheck_steps` has hooks
    ON_DEMAND = "on demand"  # steps differ too often to plan: they swap every tensor and load it on demand


@dataclass
class SignatureState:
    """The phase and the data of one signature.

    Attributes
    ----------
    phase
        The present phase.
    profiler
        The profiler of a step that has been recorded, until its profile is read; None otherwise.
    planned
        The latest profile with its plan and measurements; None before the first profile.
    deviations
        Number of steps that have differed from the recorded one.
    """

    phase: Phase = Phase.PROFILING
    profiler: Profiler | None = None
    planned: PlannedStep | None = None
    deviations: int = 0

    def enter(self, phase: Phase, why: str = "") -> None:
        """Change the phase. A change is logged, with the reason."""
        if phase is not self.phase:
            log.debug("phase: %s → %s%s", self.phase.value, phase.value, f" ({why})" if why else "")
            self.phase = phase
