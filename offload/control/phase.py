"""The state machine of a signature: its first step is profiled; then a plan is made, measured and followed.

A signature is the shapes and kinds of a step's inputs (`signature.py`). The controller changes its phase, always by
`SignatureState.enter`.

    PROFILING ──▶ PLANNING ──▶ MEASURING ──▶ STEADY, or UNHOOKED if steps need no hooks (`SlowdownPromise.needs_hooks`)
        ▲          ▲  │  ▲         │            │
        │      TRIAL ◀┘  └─────────┴────────────┤   if measured steps differ from the plan, or more memory is in use
        │                          ▲            │
        │                          └────────────┘   if a plan is measured again (`SlowdownPromise`)
        └── from any phase, if a step differs from the recorded one; to ON_DEMAND, if this happens too often; from the
            last three, if a step may need more memory than the recorded one (`PeakWatch`)

If a swap-only plan slows the step (with `max_slowdown`: if it swaps, or needs more memory than the lowest feasible
limit), a trial step follows. It tests which tensors can be recomputed, and measures the nodes. A new plan follows.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from dataclasses import dataclass

from offload.control.planned_step import PlannedStep
from offload.control.signature import Signature
from offload.profiling.profiler import Profiler

__all__ = ["Phase", "SignatureState", "SignatureStates"]

log = logging.getLogger("offload")


class Phase(enum.Enum):
    """The phases of a signature. A phase decides what the signature's steps do."""

    # One step is recorded. Steps that begin before its backward has ended swap every tensor and load it on demand.
    PROFILING = "profiling"
    PLANNING = "planning"  # a profile exists; a new plan is made before the next step
    TRIAL = "trial"  # one step tests all recipes; steps that begin before it has ended follow the plan
    MEASURING = "measuring"  # the first steps of a plan are measured
    STEADY = "steady"  # measurements agree with the plan, or the limit on new plans is reached
    UNHOOKED = "unhooked"  # nothing is copied or recomputed in a step: only one step in `recheck_steps` has hooks
    ON_DEMAND = "on demand"  # steps differed too often: no plan; every tensor is swapped, and loaded on demand


_PLANNED = Phase.MEASURING, Phase.STEADY, Phase.UNHOOKED


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
    doubted
        The latest profile, while the step is profiled again because it may need more memory now; None otherwise.
        `planned` is None then.
    comparisons
        Number of profiles that could not be compared with `doubted`.
    deviations
        Number of steps that have differed from the recorded one.
    """

    phase: Phase = Phase.PROFILING
    profiler: Profiler | None = None
    planned: PlannedStep | None = None
    doubted: PlannedStep | None = None
    comparisons: int = 0
    deviations: int = 0

    def enter(self, phase: Phase, why: str = "") -> None:
        """Change the phase. A change is logged, with the reason."""
        if phase is not self.phase:
            log.debug("phase: %s → %s%s", self.phase.value, phase.value, f" ({why})" if why else "")
            self.phase = phase

    def deviate(self, limit: int) -> None:
        """Discard the plan: a step differed from the recorded one. After `limit` such steps, no new plan is made."""
        self.planned = self.doubted = None
        self.deviations += 1
        if self.deviations == limit:
            log.info(
                "steps with equal input shapes keep deviating from the profiled step: from now on they follow no plan "
                "(every tensor that may be swapped is swapped out, and loaded when backward needs it)"
            )
        if self.deviations >= limit:
            self.enter(Phase.ON_DEMAND, "steps keep deviating from the recorded one")


class SignatureStates(OrderedDict[object, SignatureState]):
    """The states of all signatures, in order of use, latest last."""

    def use(self, signature: object, most: int) -> SignatureState:
        """Return the state of the signature that is used now. If there are over `most`, the oldest is discarded."""
        state = self.setdefault(signature, SignatureState())
        self.move_to_end(signature)
        while len(self) > most:
            oldest = self.popitem(last=False)[1]
            if oldest.profiler is not None:
                oldest.profiler.stop()
        return state

    def profilers(self) -> list[Profiler]:
        """Return the profilers of all steps whose profile has not been read."""
        return [state.profiler for state in list(self.values()) if state.profiler is not None]

    @property
    def gives_up(self) -> bool:
        """Whether the steps of some signature follow no plan because they keep deviating."""
        return any(state.phase is Phase.ON_DEMAND for state in self.values())

    @property
    def knows_temporaries(self) -> bool:
        """Whether every profile includes the bytes of temporaries."""
        return all(each.planned is None or each.planned.profile.knows_temporaries for each in self.values())

    def main(self) -> PlannedStep | None:
        """Return the `PlannedStep` with the largest number of steps; in a tie, the one used last. None without any."""
        known = [state.planned or state.doubted for state in reversed(self.values())]
        return max(filter(None, known), key=lambda each: each.steps, default=None)

    def doubt(self) -> None:
        """Have the next step of each signature that follows a plan profiled again: it may need more memory now."""
        for state in self.values():
            if state.phase in _PLANNED and state.planned is not None:
                state.planned, state.doubted, state.comparisons = None, state.planned, 0

    def lender(self, signature: object, borrow_from: int) -> SignatureState | None:
        """Return the signature used last, with a profile, whose inputs are at least as large in every dimension.

        None if there is none.

        A smaller step that follows its plan keeps the memory limit too. So if sequence lengths vary from step to step,
        not every length has to be profiled.

        Parameters
        ----------
        signature
            The signature of the step that begins. It has no plan, or a doubted one.
        borrow_from
            Number of signatures that must have a profile before a new one may use the plan of a larger one.
        """
        profiled = [(other, each) for other, each in self.items() if each.planned and not each.planned.is_incomplete]
        state = self[signature]
        needs_own = bool(state.deviations) or state.doubted is not None
        if len(profiled) < borrow_from or needs_own or not isinstance(signature, Signature):
            return None
        fitting = (
            each for other, each in reversed(profiled) if isinstance(other, Signature) and signature.is_within(other)
        )
        return next(fitting, None)
