"""A tighter lower bound on the step time, for traces that are too large for the exact planner.

Users call it as `offload.plan.prove`; the benchmarks compare plans and the cut bound with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from offload.plan.bounds import check_limit, cut_bounds
from offload.plan.certify.program import Program
from offload.plan.placement import Ints, Step, SwapPlacement
from offload.plan.simulate import Link, Swap, resident_bytes, simulate
from offload.plan.trace import Trace

__all__ = ["Proof", "prove"]

_UNITS = 100.0  # the incumbent's step time in the program's unit of time
_SPARE = 1e-6  # relative: because of rounding, plans slower than the incumbent by up to this are admitted too


@dataclass(frozen=True, slots=True)
class Proof:
    """A plan and a proven lower bound.

    Parameters
    ----------
    swaps : tuple of Swap
        The plan: the incumbent, or a faster one that was found meanwhile.
    step_seconds : float
        Its step time, in seconds.
    bound_seconds : float
        Lower bound on the step time of every swap-only plan within the limit, in seconds; at least the double bound of
        `cut_bounds`.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float
    bound_seconds: float

    @property
    def gap(self) -> float:
        """Relative difference between step time and bound."""
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
    """Return a lower bound on the step time of every swap-only plan within a limit.

    It is tighter than `cut_bounds`: tensors are swapped as a whole and in queue order.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    incumbent : sequence of Swap
        A plan within the limit.
    gap : float, default 0.001
        Relative difference between plan and bound at which the refinement stops.
    seconds_max : float, default 60.0
        Time limit, in seconds; at the limit the best bound so far is returned.

    Returns
    -------
    Proof
        The bound, and the fastest plan that was found meanwhile.

    Raises
    ------
    ImportError
        If scipy is not installed.
    InfeasibleLimitError
        If no plan stays within the limit.
    ValueError
        If the incumbent exceeds the limit.

    Notes
    -----
    The bound is the optimum of a mixed-integer program. The program is a relaxation: it enforces the limit only at some
    nodes, the cuts. So its optimum is a valid lower bound. Binary variables state which tensors swap, and for each cut
    k which are released and which are prefetched by then. Four constraints hold in every plan:

    1. The bytes that are swapped out at k cover the excess over the limit there.
    2. The copy-out channel is FIFO in pack order: if a tensor is released by k, all swapped tensors packed before it
       have been copied out. So for every node p before k, node k is ready no earlier than the end of p plus the time
       to copy out the swapped tensors that are packed at p or later, up to the last one that is released by k.
    3. The copy-in channel is FIFO: between the end of node k and the start of node u, all tensors that are swapped out
       at k and used at u or before are copied in.
    4. Nodes run one after another, each for its time.

    No constraint needs a big-M term, so the program is solved quickly.

    The first cuts are the nodes that cause the incumbent's stalls. Each solution gives a set of tensors, which is then
    placed. The nodes at which the set exceeds the limit, and those that cause stalls of its placement, become cuts too.
    If all of them are cuts already, the nodes beside the cuts are added. This ends when the bound is close to the best
    plan, or if there is no node to add.

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
        raise ValueError(
            f"the given plan needs {peak_bytes} bytes, the limit is {limit_bytes}; give a plan within the limit"
        )
    step = Step(trace, link)
    swaps, best = tuple(sorted(incumbent)), simulate(trace, incumbent, link).step_seconds
    bound = min(best, max(step.compute_seconds, cut_bounds(trace, limit_bytes, link).double))
    excess = step.unswapped_bytes - limit_bytes
    cuts = _stall_nodes(trace, link, swaps, excess)
    end = time.monotonic() + seconds_max
    while best > bound * (1 + gap) and time.monotonic() < end:
        indices, value = _solve_relaxation(step, excess, sorted(cuts), best, gap / 10, end - time.monotonic())
        bound = min(best, max(bound, value))
        if indices is None:
            break
        more = _overfull_nodes(step, indices, limit_bytes)
        found = step.place(indices, limit_bytes)
        if found is not None:
            more |= _stall_nodes(trace, link, step.swaps(found), excess)
            swaps, best = _faster(trace, link, step, found, swaps, best)
        if more <= cuts:
            beside = {k + side for k in cuts for side in (-1, 1)}
            more = {k for k in beside if 0 <= k < step.node_count and excess[k] > 0}
        if more <= cuts:
            break
        cuts |= more
    return Proof(swaps, best, bound)


def _faster(
    trace: Trace, link: Link, step: Step, found: SwapPlacement, swaps: tuple[Swap, ...], best: float
) -> tuple[tuple[Swap, ...], float]:
    seconds = simulate(trace, step.swaps(found), link).step_seconds
    return (step.swaps(found), seconds) if seconds < best else (swaps, best)


def _stall_nodes(trace: Trace, link: Link, swaps: Sequence[Swap], excess: Ints) -> set[int]:
    """Return the nodes that cause a plan's stalls, if the unswapped step exceeds the limit there.

    Such a node waits for a copy-out, or it is the last one before the prefetch of a copy-in that is late.
    """
    timing = simulate(trace, swaps, link)
    first_backward = {tensor.id: tensor.first_backward for tensor in trace.tensors}
    copied = {copy.id: copy.end for copy in timing.copy_ins}
    stall_min = 1e-9 * timing.step_seconds
    ended = (0.0, *timing.finish)
    nodes = {k for k, ready in enumerate(timing.ready) if ready - ended[k] > stall_min}
    for swap in swaps:
        if copied[swap.id] - timing.ready[first_backward[swap.id]] > stall_min:
            nodes.add(swap.prefetch - 1)
    return {k for k in nodes if excess[k] > 0}


def _overfull_nodes(step: Step, indices: Iterable[int], limit_bytes: int) -> set[int]:
    """Return nodes at which a set of tensors exceeds the limit: of adjacent ones, that with the largest excess."""
    headroom = step.headroom(list(indices), limit_bytes)
    below = np.flatnonzero(headroom < 0)
    runs = np.split(below, np.flatnonzero(np.diff(below) > 1) + 1)
    return {int(run[headroom[run].argmin()]) for run in runs if run.size}


def _solve_relaxation(
    step: Step, excess: Ints, cuts: Sequence[int], best: float, gap: float, seconds_max: float
) -> tuple[list[int] | None, float]:
    """Return the set of tensors in the best solution with these cuts, and the lower bound in seconds."""
    unit = best / _UNITS
    delay_max = (best * (1 + _SPARE) - step.compute_seconds) / unit
    program = Program()
    ready = [program.variable(at / unit, at / unit + delay_max) for at in step.clock]
    start = [program.variable(at / unit, at / unit + delay_max) for at in step.clock[:-1]]
    for k, seconds in enumerate(step.seconds):
        program.require([(1.0, start[k]), (-1.0, ready[k])], 0.0)
        program.require([(1.0, ready[k + 1]), (-1.0, start[k])], seconds / unit)
    swapped = [program.variable(0.0, 1.0, integer=True) for _ in range(step.count)]
    scale = float(max(step.bytes, default=1)) or 1.0
    released: dict[int, int] = {}  # for each tensor, its variable at the latest cut so far at which it can be away
    prefetched: dict[int, int] = {}
    for k in cuts:
        covering = [i for i in range(step.count) if step.release_min[i] <= k < step.first_backward[i]]
        for i in covering:
            here = [program.variable(0.0, 1.0, integer=True) for _ in range(2)]
            program.require([(1.0, swapped[i]), (-1.0, here[0])], 0.0)
            program.require([(1.0, here[0]), (-1.0, here[1])], 0.0)
            if i in released:
                program.require([(1.0, here[0]), (-1.0, released[i])], 0.0)
                program.require([(1.0, here[1]), (-1.0, prefetched[i])], 0.0)
            released[i], prefetched[i] = here
        away = {i: [(step.bytes[i] / scale, released[i]), (-step.bytes[i] / scale, prefetched[i])] for i in covering}
        program.require([term for terms in away.values() for term in terms], int(excess[k]) / scale)
        _add_copy_out_rows(program, step, k, {i: released[i] for i in covering}, swapped, (ready[k], start), unit)
        for use in sorted({step.first_backward[i] for i in covering}):
            copied = [i for i in covering if step.first_backward[i] <= use]
            terms = [(-step.in_seconds[i] / unit, released[i]) for i in copied]
            terms += [(step.in_seconds[i] / unit, prefetched[i]) for i in copied]
            program.require([(1.0, start[use]), (-1.0, start[k]), *terms], step.seconds[k] / unit)
    solution = program.minimize(ready[-1], seconds_max, gap)
    if solution.values is None:
        return None, solution.bound * unit
    return [i for i, column in enumerate(swapped) if solution.values[column] > 0.5], solution.bound * unit


def _add_copy_out_rows(
    program: Program,
    step: Step,
    k: int,
    released: dict[int, int],
    swapped: Sequence[int],
    times: tuple[int, Sequence[int]],
    unit: float,
) -> None:
    """Add constraint 2 for the cut k: tensors released by k have been copied out before, in pack order."""
    ready, start = times
    passed: list[int] = []  # for each tensor, a variable: 1 if the channel has reached its place in the queue by k
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
        if i in released:
            program.require([(1.0, passed[-1]), (-1.0, released[i])], 0.0)
            program.require([(1.0, done), (-1.0, released[i])], 0.0)
        copied.append((-step.out_seconds[i] / unit, done))
        nodes.append(step.packed[i])
    for first, node in enumerate(nodes):
        if first == 0 or nodes[first - 1] < node:
            program.require([(1.0, ready), (-1.0, start[node]), *copied[first:]], step.seconds[node] / unit)
