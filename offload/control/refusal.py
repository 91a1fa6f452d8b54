"""Explains why no plan keeps the memory limit: what takes the memory, and what each argument of `enable` would free."""

from __future__ import annotations

from collections.abc import Iterator

from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import InfeasibleLimitError, Reason
from offload.plan.bounds import NOT_SAVED
from offload.runtime.counters import Counts
from offload.units import format_bytes

__all__ = ["explained"]

_REASONS_MAX = 3
_SMALL_BYTES = 64 << 10
_WORTH_BYTES = 1 << 20  # knobs that free less are not named


def explained(
    error: InfeasibleLimitError,
    planned: PlannedStep,
    options: Options,
    counts: Counts,
    *,
    optimizer_bytes: int,
    movable_bytes: int,
    window_bytes: int,
    frozen_bytes: int,
) -> InfeasibleLimitError:
    """Return the error with the memory that is not saved for backward divided into parts, and with knobs.

    Parameters
    ----------
    error
        The planner's error.
    planned
        The step.
    options
        The caller's arguments.
    counts
        The session's counts.
    optimizer_bytes
        Bytes of optimizer state in memory under the plan that was tried.
    movable_bytes
        Bytes of optimizer state that would leave memory with ``optimizer_state="auto"``, without the most bytes that
        may still be being written.
    window_bytes
        Bytes of this state that are in memory at a time during an update, including what is being read and written.
    frozen_bytes
        Bytes of frozen parameters in memory that could move.
    """
    gradients = max(planned.held.gradients, *planned.profile.gradient_bytes, 0)
    in_update = planned.held.kept + gradients - movable_bytes + window_bytes
    least_bytes = max(error.least_limit_bytes - movable_bytes, in_update)
    reasons: list[Reason] = []
    for reason in error.reasons:
        reasons += _parts(reason, planned, optimizer_bytes)
    reasons.sort(key=lambda reason: -reason.bytes)
    knobs = [
        Reason(nbytes, text)
        for nbytes, text in _knobs(options, counts, movable_bytes, least_bytes, frozen_bytes)
        if nbytes >= _WORTH_BYTES
    ]
    knobs.sort(key=lambda knob: -knob.bytes)
    return InfeasibleLimitError(error.limit_bytes, error.least_limit_bytes, tuple(reasons[:_REASONS_MAX]), tuple(knobs))


def _parts(reason: Reason, planned: PlannedStep, optimizer_bytes: int) -> Iterator[Reason]:
    """Yield the parts of a reason that concerns memory not saved for backward; yield other reasons unchanged."""
    if reason.node is None:
        yield reason
        return
    made = planned.profile.gradient_bytes[reason.node] if reason.node < len(planned.profile.gradient_bytes) else 0
    gradients = min(max(planned.held.gradients, made), reason.bytes)
    state = min(optimizer_bytes, reason.bytes - gradients)
    rest = reason.bytes - gradients - state
    rows = {"gradients": gradients, "optimizer state": state, "parameters, buffers, inputs and temporaries": rest}
    at = reason.text.removeprefix(NOT_SAVED)
    yield from (Reason(nbytes, f"of {name}{at}", reason.node) for name, nbytes in rows.items() if nbytes)


def _knobs(
    options: Options, counts: Counts, movable_bytes: int, least_bytes: int, frozen_bytes: int
) -> Iterator[tuple[int, str]]:
    steps = max(1, counts.steps - 1)
    then = f"the least is then about {format_bytes(least_bytes)}"
    yield movable_bytes, f'optimizer_state="auto" lets optimizer state leave memory between updates ({then})'
    yield frozen_bytes, 'parameters="frozen" lets frozen parameters leave memory while no module uses them'
    if options.min_tensor_bytes > _SMALL_BYTES and "small" in counts:
        yield counts["small"].nbytes // steps, 'min_tensor_bytes="64KiB" swaps small tensors too'
    if options.exclude and "excluded" in counts:
        yield counts["excluded"].nbytes // steps, "without exclude, the saved tensors of those modules are swapped too"
