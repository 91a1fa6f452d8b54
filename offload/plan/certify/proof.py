"""How close to the fastest any plan is, for steps that are too large for the exact planner.

Place on the data path: none; it judges the search and the bound, in the bench.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from offload.plan.bounds import check_limit, cut_bounds
from offload.plan.certify.program import Program
from offload.plan.placement import Ints, Schedule, Step
from offload.plan.simulate import Link, Swap, resident_bytes, simulate
from offload.plan.trace import Trace

__all__ = ["Proof", "prove"]

_UNIT = 100.0  # the program's times: this many for the incumbent's step
_SPARE = 1e-6  # relative, by which the incumbent may exceed itself


@dataclass(frozen=True, slots=True)
class Proof:
    """How close to the fastest a plan is.

    Parameters
    ----------
    swaps : tuple of Swap
        The plan; the incumbent, or a faster one that was met.
    step_seconds : float
        Its step time.
    bound_seconds : float
        What no swap-only plan within the limit can beat, proven; at least the bound of two cuts.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float
    bound_seconds: float

    @property
    def gap(self) -> float:
        """By what share a faster plan could be faster, at most."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


def prove(
    trace: Trace,
    link: Link,
    limit_bytes: int,
    incumbent: Sequence[Swap],
    *,
    gap: float = 0.001,
    seconds_max: float = 60.0,
) -> Proof:
    """Return what no swap-only plan can beat, where tensors move whole and in their order.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Limit on the resident bytes.
    incumbent : sequence of Swap
        A plan within the limit.
    gap : float, default 0.001
        Between plan and bound; a smaller one is not sought.
    seconds_max : float, default 60.0
        Time after which the solver stops with the bound so far, in seconds.

    Returns
    -------
    Proof
        The bound, and the fastest plan that was met on the way.

    Raises
    ------
    ImportError
        If scipy is not installed.
    InfeasibleLimitError
        If no plan keeps the limit.
    ValueError
        If the incumbent does not.

    Notes
    -----
    The limit is asked for at some nodes only, the cuts, so that whatever the program says no plan can beat. Binary
    variables tell which tensors swap, and which of them have left, and come back, at each cut k. Four things hold in
    every plan. (1) What is away at k are at least the bytes that are too many there. (2) One channel copies out in
    the order of packing: where a tensor has left by k, so has every swapped one before it; node k is not ready
    before any node p has ended and all that was packed at p or later and has left by k has been copied. (3) One
    channel copies in: after node k has ended, all that is away at k and used by node u is copied before u starts.
    (4) Nodes take their time, one after another. None needs a large constant, so the program is solved quickly.

    First the cuts are those at which the incumbent waits. What the program takes for the best set of tensors is then
    scheduled; where it exceeds the limit or waits, cuts are added, until the bound is near the plan.

    Examples
    --------
    >>> from offload.plan.trace import Node, SavedTensor, Trace
    >>> nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
    >>> trace = Trace(nodes, (0, 0, 6, 0), (SavedTensor(7, 10, 0, 0, 0, 3, 3),))
    >>> proof = prove(trace, Link(2.0, 2.0), 10, [Swap(7, release=2, prefetch=3)])
    >>> proof.step_seconds, round(proof.bound_seconds, 6)
    (13.0, 13.0)
    """
    check_limit(trace, limit_bytes)
    peak_bytes = max(resident_bytes(trace, incumbent), default=0)
    if peak_bytes > limit_bytes:
        raise ValueError(f"the incumbent takes {peak_bytes} bytes, the limit is {limit_bytes}; give a plan within it")
    step = Step(trace, link)
    swaps, best = tuple(sorted(incumbent)), simulate(trace, incumbent, link).step_seconds
    bound = min(best, max(step.compute_seconds, cut_bounds(trace, limit_bytes, link).double))
    excess = step.kept - limit_bytes
    cuts = _waits(trace, link, swaps, excess)
    end = time.monotonic() + seconds_max
    while best > bound * (1 + gap) and time.monotonic() < end:
        numbers, value = _relaxed(step, excess, sorted(cuts), best, gap / 10, end - time.monotonic())
        bound = min(best, max(bound, value))
        if numbers is None:
            break
        more = _overfull(step, numbers, limit_bytes)
        found = step.schedule(numbers, limit_bytes)
        if found is not None:
            more |= _waits(trace, link, step.swaps(found), excess)
            swaps, best = _faster(trace, link, step, found, swaps, best)
        if more <= cuts:
            beside = {k + side for k in cuts for side in (-1, 1)}
            more = {k for k in beside if 0 <= k < step.node_count and excess[k] > 0}
        if more <= cuts:
            break
        cuts |= more
    return Proof(swaps, best, bound)


def _faster(
    trace: Trace, link: Link, step: Step, found: Schedule, swaps: tuple[Swap, ...], best: float
) -> tuple[tuple[Swap, ...], float]:
    seconds = simulate(trace, step.swaps(found), link).step_seconds
    return (step.swaps(found), seconds) if seconds < best else (swaps, best)


def _waits(trace: Trace, link: Link, swaps: Sequence[Swap], excess: Ints) -> set[int]:
    """Return the nodes whose memory a plan waits for: where too much leaves late, or keeps copies from beginning."""
    timing = simulate(trace, swaps, link)
    first_backward = {tensor.id: tensor.first_backward for tensor in trace.tensors}
    copied = {copy.id: copy.end for copy in timing.copy_ins}
    least = 1e-9 * timing.step_seconds
    ended = (0.0, *timing.finish)
    nodes = {k for k, ready in enumerate(timing.ready) if ready - ended[k] > least}
    for swap in swaps:
        if copied[swap.id] - timing.ready[first_backward[swap.id]] > least:
            nodes.add(swap.prefetch - 1)
    return {k for k in nodes if excess[k] > 0}


def _overfull(step: Step, numbers: Iterable[int], limit_bytes: int) -> set[int]:
    """Return the nodes at which a set of tensors exceeds the limit, the worst of each run of them."""
    room = step.room(list(numbers), limit_bytes)
    below = np.flatnonzero(room < 0)
    runs = np.split(below, np.flatnonzero(np.diff(below) > 1) + 1)
    return {int(run[room[run].argmin()]) for run in runs if run.size}


def _relaxed(
    step: Step, excess: Ints, cuts: Sequence[int], best: float, gap: float, seconds_max: float
) -> tuple[list[int] | None, float]:
    """Return the set of tensors that is best as far as the cuts tell, and what no plan can beat, in seconds."""
    unit = best / _UNIT
    late = (best * (1 + _SPARE) - step.compute_seconds) / unit
    program = Program()
    ready = [program.variable(at / unit, at / unit + late) for at in step.clock]
    start = [program.variable(at / unit, at / unit + late) for at in step.clock[:-1]]
    for k, seconds in enumerate(step.seconds):
        program.require([(1.0, start[k]), (-1.0, ready[k])], 0.0)
        program.require([(1.0, ready[k + 1]), (-1.0, start[k])], seconds / unit)
    swapped = [program.variable(0.0, 1.0, integer=True) for _ in range(step.count)]
    scale = float(max(step.bytes, default=1)) or 1.0
    gone: dict[int, int] = {}  # by tensor: whether it has left by the last cut, and whether it has come back
    back: dict[int, int] = {}
    for k in cuts:
        covering = [i for i in range(step.count) if step.free_from[i] <= k < step.back_at[i]]
        for i in covering:
            here = [program.variable(0.0, 1.0, integer=True) for _ in range(2)]
            program.require([(1.0, swapped[i]), (-1.0, here[0])], 0.0)
            program.require([(1.0, here[0]), (-1.0, here[1])], 0.0)
            if i in gone:
                program.require([(1.0, here[0]), (-1.0, gone[i])], 0.0)
                program.require([(1.0, here[1]), (-1.0, back[i])], 0.0)
            gone[i], back[i] = here
        away = {i: [(step.bytes[i] / scale, gone[i]), (-step.bytes[i] / scale, back[i])] for i in covering}
        program.require([term for terms in away.values() for term in terms], int(excess[k]) / scale)
        _leave_before(program, step, k, {i: gone[i] for i in covering}, swapped, (ready[k], start), unit)
        for use in sorted({step.back_at[i] for i in covering}):
            copied = [i for i in covering if step.back_at[i] <= use]
            terms = [(-step.in_seconds[i] / unit, gone[i]) for i in copied]
            terms += [(step.in_seconds[i] / unit, back[i]) for i in copied]
            program.require([(1.0, start[use]), (-1.0, start[k]), *terms], step.seconds[k] / unit)
    solution = program.minimize(ready[-1], seconds_max, gap)
    if solution.values is None:
        return None, solution.bound * unit
    return [i for i, column in enumerate(swapped) if solution.values[column] > 0.5], solution.bound * unit


def _leave_before(
    program: Program,
    step: Step,
    k: int,
    gone: dict[int, int],
    swapped: Sequence[int],
    times: tuple[int, Sequence[int]],
    unit: float,
) -> None:
    """Write down that what has left by node k has been copied out before, in the order of packing."""
    ready, start = times
    passed: list[int] = []  # how far the queue has come, tensor by tensor
    copied: list[tuple[float, int]] = []
    nodes: list[int] = []
    for i in range(step.count):
        if step.packed[i] >= k:
            break
        passed.append(program.variable(0.0, 1.0))
        if len(passed) > 1:
            program.require([(1.0, passed[-2]), (-1.0, passed[-1])], 0.0)
        done = program.variable(0.0, 1.0)
        program.require([(1.0, done), (-1.0, swapped[i]), (-1.0, passed[-1])], -1.0)
        if i in gone:
            program.require([(1.0, passed[-1]), (-1.0, gone[i])], 0.0)
            program.require([(1.0, done), (-1.0, gone[i])], 0.0)
        copied.append((-step.out_seconds[i] / unit, done))
        nodes.append(step.packed[i])
    for first, node in enumerate(nodes):
        if first == 0 or nodes[first - 1] < node:
            program.require([(1.0, ready), (-1.0, start[node]), *copied[first:]], step.seconds[node] / unit)
