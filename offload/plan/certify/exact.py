"""The fastest plan of a small instance, by mixed-integer programming.

Place on the data path: none; it judges the search, in tests and in ``offload plan --exact``.
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
        Its step time.
    optimal : bool
        Whether it is proven that no swap-only plan is faster (to a relative 1e-6).
    """

    swaps: tuple[Swap, ...]
    step_seconds: float
    optimal: bool


def fastest_swaps(
    trace: Trace, link: Link, limit_bytes: int, incumbent: Sequence[Swap], *, seconds_max: float = 60.0
) -> ExactSwaps:
    """Return the fastest swap-only plan within a limit, proven where `optimal` is set.

    Parameters
    ----------
    trace : Trace
        The step; small, since the effort grows steeply with tensors and nodes.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Limit on the resident bytes.
    incumbent : sequence of Swap
        A plan within the limit; the answer is never slower.
    seconds_max : float, default 60.0
        Time after which the solver stops with the best plan so far, in seconds.

    Returns
    -------
    ExactSwaps
        The plan, its step time, and whether it is proven optimal.

    Raises
    ------
    ImportError
        If scipy is not installed.
    ValueError
        If the instance is too large for the method.
    InfeasibleLimitError
        If no plan keeps the limit.

    Notes
    -----
    Binary variables say, for each tensor and node, whether the release and whether the prefetch has come; times are
    continuous and bounded from below only, so that the least step time is the time that `simulate` gives. The
    incumbent bounds every time from above, which keeps the disjunctions tight.
    """
    check_limit(trace, limit_bytes)
    best = simulate(trace, incumbent, link).step_seconds
    step = Step(trace, link)
    if best <= step.clock[-1]:
        return ExactSwaps(tuple(sorted(incumbent)), best, optimal=True)
    binaries = 2 * sum(back - free + 1 for back, free in zip(step.back_at, step.free_from, strict=True))
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
    program = Program()
    gone = [_flags(program, step, i) for i in range(step.count)]
    back = [_flags(program, step, i) for i in range(step.count)]
    for i in range(step.count):
        last = step.back_at[i]
        for k in range(step.free_from[i], last + 1):
            program.require([(1.0, gone[i][k]), (-1.0, back[i][k])], 0.0)
            if k < last:
                program.require([(1.0, gone[i][k + 1]), (-1.0, gone[i][k])], 0.0)
                program.require([(1.0, back[i][k + 1]), (-1.0, back[i][k])], 0.0)
        program.require([(1.0, back[i][last]), (-1.0, gone[i][last])], 0.0)
    _limit_rows(program, step, limit_bytes, gone, back)
    solution = program.minimize(_time_rows(program, step, best, gone, back), seconds_max)
    if solution.values is None:  # optimal here: nothing is faster than the incumbent
        return None, solution.optimal
    swaps = []
    for i in range(step.count):
        left = [k for k, column in gone[i].items() if solution.values[column] > 0.5]
        came = [k for k, column in back[i].items() if solution.values[column] > 0.5]
        if left and came and min(left) < min(came):
            swaps.append(Swap(step.ids[i], min(left), min(came)))
    return tuple(sorted(swaps)), solution.optimal


def _flags(program: Program, step: Step, i: int) -> dict[int, int]:
    """Return a binary variable for each node at which tensor i may have left, or come back."""
    return {k: program.variable(0.0, 1.0, integer=True) for k in range(step.free_from[i], step.back_at[i] + 1)}


def _limit_rows(
    program: Program, step: Step, limit_bytes: int, gone: Sequence[dict[int, int]], back: Sequence[dict[int, int]]
) -> None:
    scale = float(max(step.bytes, default=1)) or 1.0
    for k in range(step.node_count):
        excess = int(step.kept[k]) - limit_bytes
        if excess <= 0:
            continue
        terms = []
        for i in range(step.count):
            if step.free_from[i] <= k < step.back_at[i]:
                terms += [(step.bytes[i] / scale, gone[i][k]), (-step.bytes[i] / scale, back[i][k])]
        program.require(terms, excess / scale)


def _time_rows(
    program: Program, step: Step, best: float, gone: Sequence[dict[int, int]], back: Sequence[dict[int, int]]
) -> int:
    """Write down when everything happens, in units of the incumbent's step time; return the end's variable."""
    unit = best / 100.0
    clock = [seconds / unit for seconds in step.clock]
    late = 100.0 - clock[-1]  # how far any node may fall behind
    ready = [program.variable(clock[k], clock[k] + late) for k in range(step.node_count)]
    start = [program.variable(clock[k], clock[k] + late) for k in range(step.node_count)]
    end = program.variable(clock[-1], 100.0)
    for k in range(step.node_count):
        seconds = step.seconds[k] / unit
        program.require([(1.0, start[k]), (-1.0, ready[k])], 0.0)
        program.require([(1.0, ready[k + 1] if k + 1 < step.node_count else end), (-1.0, start[k])], seconds)
    far = 100.0
    previous = program.variable(0.0, 0.0)
    for i in range(step.count):  # the copy-out channel, in its fixed order
        seconds, swapped = step.out_seconds[i] / unit, gone[i][step.back_at[i]]
        free = program.variable(0.0, far)
        program.require([(1.0, free), (-1.0, previous), (-seconds, swapped)], 0.0)
        packed_end = step.seconds[step.packed[i]] / unit
        reach = clock[step.packed[i] + 1] + late + seconds
        program.require([(1.0, free), (-1.0, start[step.packed[i]]), (-reach, swapped)], packed_end + seconds - reach)
        for k, column in gone[i].items():
            slack = max(0.0, far - clock[k])
            program.require([(1.0, ready[k]), (-1.0, free), (-slack, column)], -slack)
        previous = free
    previous = program.variable(0.0, 0.0)
    for k in range(step.node_count):  # the copy-in channel: by prefetch node, then first use, then id
        for i in step.by_use:
            if not step.free_from[i] <= k <= step.back_at[i]:
                continue
            seconds = step.in_seconds[i] / unit
            chosen = [(1.0, back[i][k])] + ([(-1.0, back[i][k - 1])] if k > step.free_from[i] else [])
            free = program.variable(0.0, far)
            reach = clock[k] + late + seconds
            use = start[step.back_at[i]]
            slack = max(0.0, far - clock[step.back_at[i]])
            program.require([(1.0, free), (-1.0, previous)] + [(-seconds * c, v) for c, v in chosen], 0.0)
            program.require([(1.0, free), (-1.0, ready[k])] + [(-reach * c, v) for c, v in chosen], seconds - reach)
            program.require([(1.0, use), (-1.0, free)] + [(-slack * c, v) for c, v in chosen], -slack)
            previous = free
    return end
