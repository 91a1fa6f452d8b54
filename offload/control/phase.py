"""The phase of a signature: what its steps are run for, from the first one to steady ones.

The controller moves signatures from phase to phase, always through `SignatureState.enter`.

    PROFILING ──▶ PLANNING ──▶ MEASURING ──▶ STEADY ──▶ UNHOOKED      (a plan without swaps, no limit to keep)
        ▲          ▲  │  ▲         │            │          │
        │      TRIAL ◀┘  └─────────┴────────────┴──────────┘          a promise is broken, or memory has grown
        └─── the step deviates from the recorded one ◀── any ──▶ ON_DEMAND   it has done so too often

A plan that swaps alone and costs time, or under `max_slowdown` more memory than the least, is followed by one trial
step, which proves how tensors can be recomputed. The next plan chooses between both.
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
    """What the steps of a signature are run for."""

    PROFILING = "profiling"  # a step is recorded; until its backward has ended, others swap everything on demand
    PLANNING = "planning"  # recorded; the next step begins with a new plan
    TRIAL = "trial"  # one step is recorded by operator and its recipes are proven; meanwhile others follow the plan
    MEASURING = "measuring"  # the plan's first steps are measured
    STEADY = "steady"  # the plan keeps what it promised, or may not be replaced any more
    UNHOOKED = "unhooked"  # the plan swaps nothing: hooks are off, but for one step in many
    ON_DEMAND = "on demand"  # steps never run the same way twice: everything swaps, and is loaded when asked for


@dataclass
class SignatureState:
    """One signature: its phase, and what that phase works with.

    Attributes
    ----------
    profiler
        Of a recorded step whose profile has not been read yet.
    planned
        What was made of the latest profile.
    deviations
        How often its steps have deviated from the recorded one.
    """

    phase: Phase = Phase.PROFILING
    profiler: Profiler | None = None
    planned: PlannedStep | None = None
    deviations: int = 0

    def enter(self, phase: Phase, why: str = "") -> None:
        """Move on to `phase`; logged, with the reason, where it is another one."""
        if phase is not self.phase:
            log.debug("phase: %s → %s%s", self.phase.value, phase.value, f" ({why})" if why else "")
            self.phase = phase
