"""Passes each profiled step to a listener before it is planned. `offload plan train.py` and `offload fit` listen.

The listener may request a trial step. It then gets the recipes that the trial step has found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from offload.control.planned_step import PlannedStep
from offload.control.signature import Signature
from offload.options import Options, device_bytes
from offload.plan import Link
from offload.plan.trace import Trace
from offload.runtime.counters import Counts

__all__ = ["ProfileListener", "RecordedStep", "tell_profile", "tell_recipes"]


@dataclass(frozen=True)
class RecordedStep:
    """A profiled step, as passed to a listener.

    Attributes
    ----------
    trace
        The profiled step. Its `base_bytes` are those of the memory in use now, with the optimizer's state if the
        optimizer has stepped. After the trial step, the trace contains recipes,
        and of each node the shorter duration of the two steps.
    link
        The link to plan with.
    device, device_bytes
        The model's device, and the size of its memory.
    host_bytes_max
        Limit on host memory in bytes; 0 on the CPU, where nothing is swapped to it.
    may_try
        Whether a trial step may follow.
    batch
        The first dimension of the model's first input; None if there is none.
    fixed_bytes
        By node: the bytes in `trace.base_bytes` that do not depend on the batch (parameters, gradients, buffers,
        optimizer state).
    no_recipes
        Why the trial step could not run; empty if it has run or was not requested.
    frees_inputs
        Whether an input is among the trace's tensors: only the graph holds it after forward.
    """

    trace: Trace = field(repr=False)
    link: Link
    device: str
    device_bytes: int
    host_bytes_max: int
    may_try: bool
    batch: int | None
    fixed_bytes: tuple[int, ...] = field(repr=False)
    no_recipes: str = ""
    frees_inputs: bool = False


# Returns the most bytes that a trial step may take; None if it wants no trial step. It is called again with the recipes
# after the trial step.
ProfileListener = Callable[[RecordedStep], int | None]


def tell_profile(
    listener: ProfileListener | None, planned: PlannedStep, options: Options, device: torch.device
) -> None:
    """Pass a step that has just been profiled to the listener, and store the answer in `planned.trial_bytes`."""
    if listener is not None:
        may_try = options.recompute is not None and options.n_tensors is None
        planned.trial_bytes = listener(_recorded(planned, options, device, may_try=may_try))


def tell_recipes(
    listener: ProfileListener | None, planned: PlannedStep, options: Options, counts: Counts, device: torch.device
) -> None:
    """Pass the recipes of the requested trial step to the listener if it has ended; the reason if it cannot run."""
    if listener is None or planned.trial_bytes is None:
        return
    planned.read_trial(counts, cheap=options.recompute == "cheap")
    if planned.recipes is not None:
        planned.trial_bytes = None
        listener(_recorded(planned, options, device, may_try=False))


def _recorded(planned: PlannedStep, options: Options, device: torch.device, *, may_try: bool) -> RecordedStep:
    signature = planned.signature
    shapes = signature.shapes if isinstance(signature, Signature) else ()
    input_bytes = signature.input_bytes if isinstance(signature, Signature) else 0
    profile, held = planned.profile, planned.held
    trace = planned.trace()
    # Gradients that exist before the step are in `held`; others are allocated in its backward pass.
    made = [0] * len(trace.nodes) if held.gradients > profile.held.gradients else profile.gradient_bytes
    before = max(0, held.total - input_bytes)
    return RecordedStep(
        trace=trace,
        link=planned.link,
        device=str(device),
        device_bytes=device_bytes(device),
        host_bytes_max=0 if device.type == "cpu" else options.host_limit,
        may_try=may_try,
        batch=next((shape[0] for shape in shapes if shape and shape[0] > 0), None),
        fixed_bytes=tuple(min(base, before + own) for base, own in zip(trace.base_bytes, made, strict=True)),
        no_recipes=planned.recipes.reason if planned.recipes is not None else "",
        frees_inputs=profile.frees_inputs,
    )
