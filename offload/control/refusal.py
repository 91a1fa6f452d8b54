"""Explains why no plan keeps the memory limit: what takes the memory, and what each argument of `enable` would free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offload.control.planned_step import PlannedStep
from offload.options import Options
from offload.plan import InfeasibleLimitError, Reason
from offload.plan.bounds import IN_UPDATE, NOT_SAVED
from offload.runtime.counters import Counts
from offload.units import format_bytes

__all__ = ["GradientKnob", "explained"]

_REASONS_MAX = 3
_SMALL_BYTES = 64 << 10
_WORTH_BYTES = 1 << 20  # knobs that free less are not named


@dataclass(frozen=True)
class GradientKnob:
    """An argument that frees gradients.

    Attributes
    ----------
    text
        The argument, and what it does.
    nbytes_max
        Bytes of all gradients that it can free.
    ahead_bytes
        Bytes of optimizer state that are in memory in backward because of it.
    writing_bytes
        How many of the bytes may be in memory because they are still being written. If all may be, the argument is
        not named.

    `ahead_bytes` and `writing_bytes` are ignored if the most memory is in use during the update, which has such bytes
    in memory too.
    """

    text: str
    nbytes_max: int
    ahead_bytes: int = 0
    writing_bytes: int = 0

    def freed_bytes(self, gradient_bytes: int, *, in_update: bool) -> int:
        """Return how many bytes it frees at most if this many bytes of gradients are in memory."""
        nbytes = min(gradient_bytes, self.nbytes_max)
        if in_update:
            return nbytes
        nbytes -= self.ahead_bytes
        return nbytes if nbytes > self.writing_bytes else 0


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
    parameter_bytes: int,
    copied_bytes: int,
    moved_parameter_bytes: Callable[[int], int],
    for_gradients: Sequence[GradientKnob],
    lacks_optimizer: bool,
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
    frozen_bytes, parameter_bytes
        By how many bytes frozen parameters in memory, and all parameters, could be fewer.
    copied_bytes
        How many bytes of them may be read ahead or still be written at a time if both move.
    moved_parameter_bytes
        Takes a memory limit in bytes. Returns the bytes of moved parameters that are in memory under it.
    for_gradients
        Arguments that would free gradients.
    lacks_optimizer
        Whether no optimizer has updated the model yet.
    """
    in_update = planned.held.kept + planned.gradients_in_update - movable_bytes + window_bytes
    least_bytes = max(error.least_limit_bytes - movable_bytes, in_update)
    reasons: list[Reason] = []
    for reason in error.reasons:
        reasons += _parts(reason, planned, optimizer_bytes)
    reasons = sorted((reason for reason in reasons if reason.bytes), key=lambda reason: -reason.bytes)
    gradients, is_in_update = _gradients_at_peak(error, planned)
    found = [
        *_knobs(options, counts, movable_bytes, least_bytes),
        *_knobs_of_parameters(frozen_bytes, parameter_bytes, copied_bytes),
        *((each.freed_bytes(gradients, in_update=is_in_update), each.text) for each in for_gradients),
    ]
    knobs = [Reason(nbytes, text) for nbytes, text in found if nbytes >= _WORTH_BYTES]
    knobs.sort(key=lambda knob: -knob.bytes)
    least_bytes = _least_with_parameters(error, moved_parameter_bytes)
    shown = tuple(reasons[:_REASONS_MAX])
    return InfeasibleLimitError(error.limit_bytes, least_bytes, shown, tuple(knobs), lacks_optimizer)


def _least_with_parameters(error: InfeasibleLimitError, moved_parameter_bytes: Callable[[int], int]) -> int:
    """Return the least feasible limit, with as many bytes of moved parameters in memory as there are under it.

    The error counts them as under the limit that was refused; under a higher one, more of them are read ahead.
    """
    least_bytes = error.least_limit_bytes
    others_bytes = least_bytes - moved_parameter_bytes(error.limit_bytes)
    while (needed_bytes := others_bytes + moved_parameter_bytes(least_bytes)) > least_bytes:
        least_bytes = needed_bytes  # ends: these bytes grow by at most 3/16 of what the limit grows by
    return least_bytes


def _parts(reason: Reason, planned: PlannedStep, optimizer_bytes: int) -> Iterator[Reason]:
    """Yield the parts of a reason that concerns memory not saved for backward; yield other reasons unchanged."""
    if reason.node is None:
        yield reason
        return
    gradients = min(_gradients_at(reason.node, planned), reason.bytes)
    state = min(optimizer_bytes, reason.bytes - gradients)
    rest = reason.bytes - gradients - state
    rows = {"gradients": gradients, "optimizer state": state, "parameters, buffers, inputs and temporaries": rest}
    at = reason.text.removeprefix(NOT_SAVED)
    yield from (Reason(nbytes, f"of {name}{at}", reason.node) for name, nbytes in rows.items() if nbytes)


def _gradients_at(node: int, planned: PlannedStep) -> int:
    """Return the bytes of gradients in memory at a node."""
    made = planned.profile.gradient_bytes
    return max(planned.held.gradients, made[node] if node < len(made) else 0)


def _gradients_at_peak(error: InfeasibleLimitError, planned: PlannedStep) -> tuple[int, bool]:
    """Return the bytes of gradients in memory where `least_limit_bytes` are needed, and whether this is the update.

    The bytes are 0 if three saved tensors are larger than all memory that is not saved for backward.
    """
    for reason in error.reasons:
        if reason.node is not None:
            return min(_gradients_at(reason.node, planned), reason.bytes), False
        if reason.text.startswith(IN_UPDATE):
            return min(planned.gradients_in_update, reason.bytes), True
    return 0, False


def _knobs_of_parameters(frozen_bytes: int, parameter_bytes: int, copied_bytes: int) -> Iterator[tuple[int, str]]:
    while_unused = "leave memory while no module uses them"
    yield frozen_bytes, f'parameters="frozen" lets frozen parameters {while_unused}'
    if parameter_bytes > frozen_bytes:
        yield parameter_bytes - copied_bytes, f'parameters="all" lets all parameters {while_unused}'


def _knobs(options: Options, counts: Counts, movable_bytes: int, least_bytes: int) -> Iterator[tuple[int, str]]:
    steps = max(1, counts.steps - 1)
    then = f"the least is then about {format_bytes(least_bytes)}"
    yield movable_bytes, f'optimizer_state="auto" lets optimizer state leave memory between updates ({then})'
    if options.min_tensor_bytes > _SMALL_BYTES and "small" in counts:
        yield counts["small"].nbytes // steps, 'min_tensor_bytes="64KiB" swaps small tensors too'
    if options.exclude and "excluded" in counts:
        yield counts["excluded"].nbytes // steps, "without exclude, the saved tensors of those modules are swapped too"
