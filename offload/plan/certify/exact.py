"""The fastest swap-only plan of a small trace, by mixed-integer programming.

Tests and ``offload plan --exact`` compare the search with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.bounds import check_limit
from offload.plan.certify.program import Program
from offload.plan.placement import Step
from offload.plan.simulate import Link, Swap, resident_bytes, simulate
from offload.plan.trace import Trace

__all__ = ["BINARIES_MAX", "ExactSwaps", "fastest_swaps"]

BINARIES_MAX = 20_000


@dataclass(frozen=True, slots=True)
class ExactSwaps:
    """The outcome of the exact planner.

    Parameters
    ----------
    swaps : tuple of Swap
        The best plan found.
    step_seconds : float
        Its step time, in seconds.
    optimal : bool
        Whether it is proven that no swap-only plan is faster, to a relative 1e-6.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float
    optimal: bool


def fastest_swaps(
    trace: Trace, link: Link, limit_bytes: int, incumbent: Sequence[Swap], *, seconds_max: float = 60.0
) -> ExactSwaps:
    """Return the fastest swap-only plan within a limit that the solver finds in a given time.

    Parameters
    ----------
    trace : Trace
        The step. The solver's time grows steeply with its tensors and nodes.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    incumbent : sequence of Swap
        A plan within the limit. The result is at least as fast.
    seconds_max : float, default 60.0
        Time limit of the solver, in seconds; at the limit it returns the best plan so far.

    Returns
    -------
    ExactSwaps
        The plan, its step time in seconds, and whether it is proven optimal.

    Raises
    ------
    ImportError
        If scipy is not installed.
    ValueError
        If the trace needs more than `BINARIES_MAX` binary variables.
    InfeasibleLimitError
        If no plan stays within the limit.

    Notes
    -----
    For each tensor and node, two binary variables state whether the tensor has been released and whether it has been
    prefetched by then. Start and end times are continuous variables with lower bounds from the rules of `simulate`, so
    minimizing the end of the step gives the time that `simulate` gives. The constraints that hold only for a swapped
    tensor use big-M terms; the incumbent's step time bounds every time from above and keeps these terms small.
    """
    check_limit(trace, limit_bytes)
    best = simulate(trace, incumbent, link).step_seconds
    step = Step(trace, link)
    if best <= step.clock[-1]:
        return ExactSwaps(tuple(sorted(incumbent)), best, optimal=True)
    binaries = 2 * sum(last - first + 1 for last, first in zip(step.first_backward, step.release_min, strict=True))
    if binaries > BINARIES_MAX:
        raise ValueError(
            f"exact: {binaries} binary variables, the limit is {BINARIES_MAX}; leave exact out for a trace of this size"
        )
    found, optimal = _solve(step, limit_bytes, best, seconds_max)
    if found is not None and max(resident_bytes(trace, found)) <= limit_bytes:
        value = simulate(trace, found, link).step_seconds
        if value < best:
            return ExactSwaps(found, value, optimal)
    return ExactSwaps(tuple(sorted(incumbent)), best, optimal)


def _solve(step: Step, limit_bytes: int, best: float, seconds_max: float) -> tuple[tuple[Swap, ...] | None, bool]:
    """Return the fastest plan found (None if none is faster than `best`), and whether it is proven optimal."""
    program = Program()
    released = [_binaries(program, step, i) for i in range(step.count)]
    prefetched = [_binaries(program, step, i) for i in range(step.count)]
    for i in range(step.count):
        last = step.first_backward[i]
        for k in range(step.release_min[i], last + 1):
            program.require([(1.0, released[i][k]), (-1.0, prefetched[i][k])], 0.0)
            if k < last:
                program.require([(1.0, released[i][k + 1]), (-1.0, released[i][k])], 0.0)
                program.require([(1.0, prefetched[i][k + 1]), (-1.0, prefetched[i][k])], 0.0)
        program.require([(1.0, prefetched[i][last]), (-1.0, released[i][last])], 0.0)
    _add_limit_rows(program, step, limit_bytes, released, prefetched)
    solution = program.minimize(_add_time_rows(program, step, best, released, prefetched), seconds_max)
    if solution.values is None:  # in this case `optimal` states that no plan is faster than the incumbent
        return None, solution.optimal
    swaps = []
    for i in range(step.count):
        away = [k for k, column in released[i].items() if solution.values[column] > 0.5]
        back = [k for k, column in prefetched[i].items() if solution.values[column] > 0.5]
        if away and back and min(away) < min(back):
            swaps.append(Swap(step.ids[i], min(away), min(back)))
    return tuple(sorted(swaps)), solution.optimal


def _binaries(program: Program, step: Step, i: int) -> dict[int, int]:
    """Return a binary variable for each node at which tensor i may be released or prefetched."""
    nodes = range(step.release_min[i], step.first_backward[i] + 1)
    return {k: program.variable(0.0, 1.0, integer=True) for k in nodes}


def _add_limit_rows(
    program: Program,
    step: Step,
    limit_bytes: int,
    released: Sequence[dict[int, int]],
    prefetched: Sequence[dict[int, int]],
) -> None:
    """Require for each node over the limit that the bytes swapped out are at least the excess."""
    scale = float(max(step.bytes, default=1)) or 1.0
    for k in range(step.node_count):
        excess = int(step.unswapped_bytes[k]) - limit_bytes
        if excess <= 0:
            continue
        terms = []
        for i in range(step.count):
            if step.release_min[i] <= k < step.first_backward[i]:
                terms += [(step.bytes[i] / scale, released[i][k]), (-step.bytes[i] / scale, prefetched[i][k])]
        program.require(terms, excess / scale)


def _add_time_rows(
    program: Program,
    step: Step,
    best: float,
    released: Sequence[dict[int, int]],
    prefetched: Sequence[dict[int, int]],
) -> int:
    """Add the rules of `simulate`; return the variable of the step's end. The incumbent takes 100 units of time."""
    unit = best / 100.0
    clock = [seconds / unit for seconds in step.clock]
    delay_max = 100.0 - clock[-1]  # the largest delay of a node in a plan that is at least as fast as the incumbent
    ready = [program.variable(clock[k], clock[k] + delay_max) for k in range(step.node_count)]
    start = [program.variable(clock[k], clock[k] + delay_max) for k in range(step.node_count)]
    end = program.variable(clock[-1], 100.0)
    for k in range(step.node_count):
        seconds = step.seconds[k] / unit
        program.require([(1.0, start[k]), (-1.0, ready[k])], 0.0)
        program.require([(1.0, ready[k + 1] if k + 1 < step.node_count else end), (-1.0, start[k])], seconds)
    time_max = 100.0
    previous = program.variable(0.0, 0.0)
    for i in range(step.count):  # the copy-out channel, in pack order
        seconds, swapped = step.out_seconds[i] / unit, released[i][step.first_backward[i]]
        channel_free = program.variable(0.0, time_max)
        program.require([(1.0, channel_free), (-1.0, previous), (-seconds, swapped)], 0.0)
        packed_end = step.seconds[step.packed[i]] / unit
        big_m = clock[step.packed[i] + 1] + delay_max + seconds
        program.require(
            [(1.0, channel_free), (-1.0, start[step.packed[i]]), (-big_m, swapped)], packed_end + seconds - big_m
        )
        for k, column in released[i].items():
            big_m = max(0.0, time_max - clock[k])
            program.require([(1.0, ready[k]), (-1.0, channel_free), (-big_m, column)], -big_m)
        previous = channel_free
    previous = program.variable(0.0, 0.0)
    for k in range(step.node_count):  # the copy-in channel: by prefetch, then first_backward, then id
        for i in step.copy_in_order:
            use = step.first_backward[i]
            if not step.release_min[i] <= k <= use:
                continue
            seconds = step.in_seconds[i] / unit
            here = [(1.0, prefetched[i][k])]  # this sum is 1 if the tensor is prefetched at node k, otherwise 0
            if k > step.release_min[i]:
                here.append((-1.0, prefetched[i][k - 1]))
            channel_free = program.variable(0.0, time_max)
            ready_m = clock[k] + delay_max + seconds
            use_m = max(0.0, time_max - clock[use])
            program.require([(1.0, channel_free), (-1.0, previous)] + [(-seconds * c, v) for c, v in here], 0.0)
            program.require(
                [(1.0, channel_free), (-1.0, ready[k])] + [(-ready_m * c, v) for c, v in here], seconds - ready_m
            )
            program.require([(1.0, start[use]), (-1.0, channel_free)] + [(-use_m * c, v) for c, v in here], -use_m)
            previous = channel_free
    return end
