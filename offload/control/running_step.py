"""Tells at which node of its plan the latest step is, to explain an out-of-memory error."""

from __future__ import annotations

import weakref

from offload.plan import Plan
from offload.runtime.executor import ScheduleExecutor

__all__ = ["RunningStep"]


class RunningStep:
    """The latest step of a model, if it follows a plan. Does not keep the step's executor alive."""

    def __init__(self) -> None:
        self._executor: weakref.ref[ScheduleExecutor] | None = None
        self._plan: Plan | None = None
        self._keeps_all = False

    def follows(self, executor: ScheduleExecutor, plan: Plan | None, *, keeps_all: bool = False) -> ScheduleExecutor:
        """Note that a step begins that follows a plan. Returns its executor.

        `keeps_all`: it is a reference step that keeps every tensor.
        """
        self._executor, self._plan, self._keeps_all = weakref.ref(executor), plan, keeps_all
        return executor

    def end(self) -> None:
        """Note that a step begins; it may follow no plan."""
        self._executor = self._plan = None
        self._keeps_all = False

    @property
    def keeps_all(self) -> bool:
        """Whether the latest step is a reference step that keeps every tensor."""
        return self._keeps_all

    def place(self) -> tuple[Plan, int] | None:
        """Return the plan and the present node; None if the latest step follows no plan or has deviated from it."""
        executor = self._executor() if self._executor is not None else None
        if executor is None or self._plan is None or not executor.on_schedule:
            return None
        return self._plan, executor.cursor.node
