"""The figures of a step for loggers: TensorBoard, W&B, progress bars, and the metric logging of frameworks.

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
from offload.units import format_bytes, format_seconds

__all__ = ["FIGURES", "StepLogger", "StepMetrics", "in_words"]

_MIB = 1 << 20
_PREFIX = "offload/"
FIGURES = tuple(
    f"{_PREFIX}{name}" for name in ("peak_mib", "saved_mib", "swapped_mib", "stalled_ms", "slowdown_percent")
)


class StepMetrics:
    """Reads the figures of a model's steps.

    `read` returns these figures, as far as they are known: ``peak_mib``, the peak of memory so far, of torch's tensors
    on a GPU and of the process on the CPU; ``saved_mib``, by how much the plan lowers the peak of a step;
    ``swapped_mib`` and ``stalled_ms``, how much each step since the last call swapped out and how long it waited for
    copies, on average, or the values of that call if no step is over since; ``slowdown_percent``, the slowdown of the
    last measured steps relative to their computation.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._stalled_seconds = 0.0
        self._swapped_bytes = 0
        self._of_latest: dict[str, float] = {}

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
        stalled, swapped = here.engine.store.stats()["stall_seconds"], here.swapped.nbytes
        over, waited, left = steps - self._steps, stalled - self._stalled_seconds, swapped - self._swapped_bytes
        self._steps, self._stalled_seconds, self._swapped_bytes = steps, stalled, swapped
        if min(over, waited, left) < 0:  # the model was moved to another device, whose figures begin at 0
            self._of_latest = {}
        elif over > 0:
            self._of_latest = {"swapped_mib": left / _MIB / over, "stalled_ms": 1e3 * waited / over}
        found = {"peak_mib": peak_bytes(here.device) / _MIB, **self._of_latest}
        main = here.controller.main
        if isinstance(here.controller, PlanController):
            plan = main.plan if isinstance(main, PlannedStep) else None
            if plan is not None:
                found["saved_mib"] = (plan.unswapped_peak_bytes - plan.peak_bytes) / _MIB
        if main is not None:
            slowdown = _slowdown(main)
            found |= {} if slowdown is None else {"slowdown_percent": 100 * slowdown}
        return {f"{_PREFIX}{name}": value for name, value in found.items()}


def in_words(figures: dict[str, float]) -> dict[str, str]:
    """Return figures of `StepMetrics.read` as values for a progress bar."""
    known = {name.removeprefix(_PREFIX): value for name, value in figures.items()}
    shown = {
        "peak": format_bytes(round(known["peak_mib"] * _MIB)),
        "swapped": format_bytes(round(known.get("swapped_mib", 0) * _MIB)),
        "stalled": format_seconds(known.get("stalled_ms", 0) / 1e3),
    }
    if "slowdown_percent" in known:
        shown["slowdown"] = f"{known['slowdown_percent']:+.1f} %"
    return shown


class StepLogger:
    """Logs the figures of each step when the next one begins.

    An exception of the target passes on, like that of a forward hook. Nothing more is logged there.

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
        if step <= 0:
            return
        try:
            self._write(figures, step)
        except BaseException:  # also an interrupt
            enabled.step_listeners.remove(self)
            raise


def _slowdown(main: Any) -> float | None:
    """Return the measured slowdown of the plan, or of the last measured steps; None if no step was measured."""
    if isinstance(main, PlannedStep):
        judged = main.search.judged(main.plan)
        if judged is not None:
            return judged.measured
        taken, computed = [cost.step for cost in main.costs], [cost.computed for cost in main.costs]
    else:
        taken, computed = list(main.step_seconds), list(main.compute_seconds)
    return median(taken) / median(computed) - 1 if taken and median(computed) > 0 else None
