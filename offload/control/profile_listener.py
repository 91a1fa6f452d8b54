"""Passes profiled steps to a listener before they are planned: to `offload plan train.py`.

The listener may request a trial step too, and then gets the recipes that this step has found.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import Link
from offload.plan.trace import Trace
from offload.runtime.counters import Counts

__all__ = ["ProfileListener", "tell_profile", "tell_recipes"]

# Called with the trace, the link, the limit on host memory in bytes, and whether a trial step may follow. Returns the
# most bytes that such a step may take, None for none. It is called again, with the recipes, after that step.
ProfileListener = Callable[[Trace, Link, int, bool], int | None]


def tell_profile(listener: ProfileListener | None, planned: PlannedStep, options: Options, *, on_cpu: bool) -> None:
    """Pass a step that has just been profiled to the listener; its answer is stored in `planned.trial_bytes`."""
    if listener is not None:
        may_try = options.recompute is not None and options.n_tensors is None
        host_bytes = 0 if on_cpu else options.host_limit
        planned.trial_bytes = listener(planned.profile.trace, planned.link, host_bytes, may_try)


def tell_recipes(
    listener: ProfileListener | None, planned: PlannedStep, options: Options, counts: Counts, *, on_cpu: bool
) -> None:
    """Pass the recipes of the requested trial step to the listener, if the step is over or cannot run."""
    if listener is None or planned.trial_bytes is None:
        return
    planned.read_trial(counts, cheap=options.recompute == "cheap")
    if planned.recipes is not None:
        planned.trial_bytes = None
        trace = planned.recipes.added_to(planned.profile.trace, {})
        listener(trace, planned.link, 0 if on_cpu else options.host_limit, False)
