"""Where the latest step is in its plan. An out-of-memory error is explained with it."""

from __future__ import annotations

import weakref

from offload.plan import Plan
from offload.runtime.executor import ScheduleExecutor

__all__ = ["RunningStep"]


class RunningStep:
    """The latest step of a model, if it follows a plan. It keeps the step's executor alive no longer than others do."""

    def __init__(self) -> None:
        self._executor: weakref.ref[ScheduleExecutor] | None = None
        self._plan: Plan | None = None

    def follows(self, executor: ScheduleExecutor, plan: Plan | None) -> ScheduleExecutor:
        """A step begins that follows a plan."""
        self._executor, self._plan = weakref.ref(executor), plan
        return executor

    def end(self) -> None:
        """A step begins that may follow none."""
        self._executor = self._plan = None

    def place(self) -> tuple[Plan, int] | None:
        """Return the plan and the node in which the step is; None if the latest step follows none, or has left it."""
        executor = self._executor() if self._executor is not None else None
        if executor is None or self._plan is None or not executor.on_schedule:
            return None
        return self._plan, executor.cursor.node
