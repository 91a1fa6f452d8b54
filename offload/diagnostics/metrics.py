"""The figures of a step for loggers: TensorBoard, W&B, and the metric logging of frameworks.

They are read when the next step begins; this takes a few look-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger
from statistics import median
from typing import Any

from offload.control.controller import PlanController
from offload.control.enabled_model import EnabledModel
from offload.control.planned_step import PlannedStep
from offload.devices.memory import peak_bytes

__all__ = ["StepLogger", "StepMetrics"]

_MIB = 1 << 20
_PREFIX = "offload/"


class StepMetrics:
    """Reads the figures of a model's steps.

    `read` returns these figures, as far as they are known: ``peak_mib``, the peak of memory so far, of torch's tensors
    on a GPU and of the process on the CPU; ``saved_mib``, by how much the plan lowers the peak of a step;
    ``stalled_ms``, how long each step since the last call waited for copies, on average; ``slowdown_percent``, the
    slowdown of the last measured steps relative to their computation.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._stalled_seconds = 0.0

    def read(self, enabled: EnabledModel, *, is_step_begun: bool = False) -> dict[str, float]:
        """Return the figures by name, each beginning with ``offload/``.

        Parameters
        ----------
        enabled
            The model.
        is_step_begun
            Whether the next step has begun already, so that it must not be counted.
        """
        here = enabled.on_device
        steps = here.counts.steps - is_step_begun
        stalled = here.engine.store.stats()["stall_seconds"]
        waited, over = stalled - self._stalled_seconds, steps - self._steps
        self._steps, self._stalled_seconds = steps, stalled
        found = {"peak_mib": peak_bytes(here.device) / _MIB}
        if over > 0 and waited >= 0:  # otherwise the model was moved to another device
            found["stalled_ms"] = 1e3 * waited / over
        main = here.controller.main
        if isinstance(here.controller, PlanController):
            plan = main.plan if isinstance(main, PlannedStep) else None
            if plan is not None:
                found["saved_mib"] = (plan.unswapped_peak_bytes - plan.peak_bytes) / _MIB
        if main is not None:
            slowdown = _slowdown(main)
            found |= {} if slowdown is None else {"slowdown_percent": 100 * slowdown}
        return {f"{_PREFIX}{name}": value for name, value in found.items()}


class StepLogger:
    """Logs the figures of each step when the next one begins.

    Parameters
    ----------
    target
        A ``SummaryWriter`` of TensorBoard, a run of W&B, or a function that takes the figures and the step's number.
    commit
        W&B: whether each call ends a step of the run. Otherwise the figures go with the loop's next ``run.log``.

    Raises
    ------
    TypeError
        `target` is none of these.
    """

    def __init__(self, target: Any, *, commit: bool = False) -> None:
        self._metrics = StepMetrics()
        self._write: Callable[[dict[str, float], int], object]
        if hasattr(target, "add_scalar"):
            self._write = lambda figures, step: [target.add_scalar(*each, step) for each in figures.items()]
        elif hasattr(target, "log") and not isinstance(target, Logger):
            if hasattr(target, "define_metric"):  # the run counts its own steps, which are not the model's
                target.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")
            self._write = lambda figures, step: target.log({**figures, f"{_PREFIX}step": step}, commit=commit)
        elif callable(target):
            self._write = target
        else:
            raise TypeError(
                "log_to takes a SummaryWriter, a W&B run or a function of figures and step, not "
                f"{type(target).__name__}"
            )

    def __call__(self, enabled: EnabledModel) -> None:
        """Log the previous step, when a step has begun."""
        step = enabled.on_device.counts.steps - 1
        figures = self._metrics.read(enabled, is_step_begun=True)
        if step > 0:
            self._write(figures, step)


def _slowdown(main: Any) -> float | None:
    """Return the slowdown of the last measured steps; None if no step was measured."""
    if isinstance(main, PlannedStep):
        known = main.frontier.slowdown_of(main.plan) if main.plan is not None else None
        if known is not None:
            return known
        taken, computed = [cost.step for cost in main.costs], [cost.computed for cost in main.costs]
    else:
        taken, computed = list(main.step_seconds), list(main.compute_seconds)
    return median(taken) / median(computed) - 1 if taken and median(computed) > 0 else None
