"""A tighter lower bound on the step time of plans that swap and recompute.

Users call it as `offload.plan.prove_joint`; the benchmarks compare plans and the joint bound with it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offload.plan.bounds import check_limit
from offload.plan.certify.program import Program
from offload.plan.certify.proof import add_copy_out_rows, overfull_nodes, stall_nodes
from offload.plan.certify.runs import Run, chains_of, runs_of
from offload.plan.joint_bounds import joint_bound
from offload.plan.placement import Ints, Step
from offload.plan.recompute import recomputed
from offload.plan.result import Plan, make_plan
from offload.plan.simulate import Link
from offload.plan.swap_search import minimal_set, rankings
from offload.plan.trace import Trace

__all__ = ["JointProof", "prove_joint"]

_UNITS = 100.0  # the incumbent's step time in the program's unit of time
_SPARE = 1e-6  # relative: the program admits plans this much slower than the incumbent, against rounding
_MARGIN = 1 - 1e-6  # so that rounding does not hide that the gap asked for is reached
_STRIDE = 0.01  # relative; if the target is further above the bound, one halfway is tried first
_ANY_SOLUTION = 1.0  # relative gap at which the solver ends with the first solution that it finds
_RANKINGS = 3  # number of rankings whose minimal sets are tried as swaps for a solution's dropped tensors


@dataclass(frozen=True, slots=True)
class JointProof:
    """A plan and a proven lower bound.

    Parameters
    ----------
    plan : Plan
        The incumbent, or a faster plan that was found meanwhile.
    bound_seconds : float
        Lower bound on the step time of every plan within the limit that swaps and recomputes, in seconds; at least
        `joint_bound`.
    """

    plan: Plan
    bound_seconds: float

    @property
    def gap(self) -> float:
        """Relative difference between step time and bound."""
        return self.plan.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0


def prove_joint(plan: Plan, *, gap: float = 0.001, seconds_max: float = 60.0) -> JointProof:
    """Return a lower bound on the step time of every plan within a limit that swaps and recomputes.

    It is tighter than `joint_bound`: tensors are swapped and dropped as a whole, and sources have to be resident.

    Parameters
    ----------
    plan : Plan
        A plan within its own limit.
    gap : float, default 0.001
        Relative difference between plan and bound at which the refinement stops.
    seconds_max : float, default 60.0
        Time limit, in seconds; at the limit the best bound so far is returned.

    Returns
    -------
    JointProof
        The bound, and the fastest plan that was found meanwhile.

    Raises
    ------
    ImportError
        If scipy is not installed.
    InfeasibleLimitError
        If no plan stays within the limit.
    ValueError
        If the plan exceeds its limit.

    Notes
    -----
    The program is that of `prove`, with a binary variable for each tensor that can be dropped. It enforces the limit at
    some nodes only, the cuts, so its optimum is a valid lower bound. Six more constraints hold in every plan:

    1. A tensor is swapped, dropped or kept.
    2. A tensor is in use again at a cut if a dropped tensor that is recomputed from it has been used by then, or is
       itself in use again. A tensor in use is neither swapped out nor freed.
    3. A dropped tensor that is freed at a cut is recomputed after the cut, at its first use at the latest.
    4. A dropped tensor that is not a source of another one is recomputed at its first use. Any other dropped tensor is
       recomputed between the first use of a tensor that can be recomputed from it and its own first use.
    5. The dropped tensors of a chain are its runs (`runs`): each tensor that is not dropped ends one and begins the
       next. So runs are the edges of a path through the chain, and the program's linear relaxation is a mixture of
       sets of runs, each with all that it needs.
    6. The first use of a run has brought back all of its tensors, and needs the tensor before it. A run that does not
       fit within the limit is none.

    The program is solved for plans faster than a target: halfway between the bound and the plan, then the gap asked
    for. If there is none, the target is a bound. Otherwise the first solution gives more cuts.
    """
    trace, link, limit_bytes = plan.trace, plan.link, plan.limit_bytes
    check_limit(trace, limit_bytes)
    if plan.peak_bytes > limit_bytes:
        raise ValueError(
            f"the incumbent takes {plan.peak_bytes} bytes, the limit is {limit_bytes}; give a plan within it"
        )
    end = time.monotonic() + seconds_max
    recipes = _Recipes(trace, link, limit_bytes)
    step = recipes.step
    bound = min(plan.step_seconds, max(step.compute_seconds, joint_bound(trace, limit_bytes, link)))
    excess = step.unswapped_bytes - limit_bytes
    cuts = _nodes_of(plan, excess)
    precision = _ANY_SOLUTION
    while plan.step_seconds > bound * (1 + gap) and time.monotonic() < end:
        target = plan.step_seconds / (1 + gap * _MARGIN)
        if precision == _ANY_SOLUTION and target > bound * (1 + _STRIDE):
            target = (target + bound) / 2
        left = end - time.monotonic()
        dropped, value = _solve_relaxation(recipes, excess, sorted(cuts), target, precision, left)
        bound = min(plan.step_seconds, max(bound, min(value, target)))
        if dropped is None:
            if value < target:
                break
            continue
        more, found = _placed(trace, link, limit_bytes, dropped)
        if found is not None:
            more |= _nodes_of(found, excess)
            plan = min(plan, found, key=lambda each: each.step_seconds)
        more = {k for k in more if excess[k] > 0}
        if more <= cuts:
            beside = {k + side for k in cuts for side in (-1, 1)}
            more = {k for k in beside if 0 <= k < step.node_count and excess[k] > 0}
        if more <= cuts:
            if precision != _ANY_SOLUTION:
                break
            precision = gap / 10
        cuts |= more
    return JointProof(plan, bound)


class _Recipes:
    """The step, and for each tensor its recipe's seconds and the tensors that are recomputed from it, by index."""

    def __init__(self, trace: Trace, link: Link, limit_bytes: int) -> None:
        self.step = step = Step(trace, link)
        place = {tensor_id: i for i, tensor_id in enumerate(step.ids)}
        self.seconds: dict[int, float] = {}
        self.makes: dict[int, list[int]] = {}
        for tensor in trace.tensors:
            if tensor.recompute is not None:
                i = place[tensor.id]
                self.seconds[i] = tensor.recompute.seconds
                for source in set(tensor.recompute.inputs):
                    self.makes.setdefault(place[source], []).append(i)
        self.earliest = list(step.first_backward)  # earliest node at which each tensor can be recomputed
        sources = {i: [j for j, made in self.makes.items() if i in made] for i in self.seconds}
        waiting = sorted(self.seconds, key=lambda i: -step.first_backward[i])
        while waiting:
            i = waiting.pop()
            for source in sources[i]:
                if self.earliest[i] < self.earliest[source]:
                    self.earliest[source] = self.earliest[i]
                    if source in sources:
                        waiting.append(source)
        self.chains = [(chain, list(runs_of(trace, step, chain, limit_bytes))) for chain in chains_of(trace, step)]

    def seconds_of(self, chain: Sequence[int], run: Run) -> dict[int, float]:
        """Return by node the seconds of those recomputations of a run that are at this node in every plan."""
        seconds: dict[int, float] = {}
        alone = True  # whether only tensors of the chain are recomputed from this tensor and those behind it
        for place in reversed(range(run.first, run.end)):
            i, at = chain[place], run.at[place - run.first]
            alone = alone and set(self.makes.get(i, ())) <= set(chain[place + 1 : place + 2])
            if alone or self.earliest[i] == at:
                seconds[at] = seconds.get(at, 0.0) + self.seconds[i]
        return seconds


def _nodes_of(plan: Plan, excess: Ints) -> set[int]:
    """Return the nodes over the limit at which a plan waits or recomputes, and the fullest."""
    nodes = stall_nodes(plan.recomputed_trace, plan.link, plan.swaps, excess)
    nodes |= {int(excess.argmax())}
    return {k for k in nodes if excess[k] > 0}


def _placed(trace: Trace, link: Link, limit_bytes: int, dropped: Collection[int]) -> tuple[set[int], Plan | None]:
    """Return the nodes over the limit if these tensors are dropped; if there are none, also the fastest plan found."""
    step = Step(recomputed(trace, dropped), link)
    more = overfull_nodes(step, range(step.count), limit_bytes)
    if more:
        return more, None
    found = [step.place(minimal_set(step, each, limit_bytes), limit_bytes) for each in rankings(step)[:_RANKINGS]]
    placed = [placement for placement in found if placement is not None]
    if not placed:
        return more, None
    best = min(placed, key=lambda placement: placement.step_seconds)
    return more, make_plan(trace, link, step.swaps(best), limit_bytes, recomputes=dropped)


def _solve_relaxation(
    recipes: _Recipes, excess: Ints, cuts: Sequence[int], best: float, gap: float, seconds_max: float
) -> tuple[set[int] | None, float]:
    """Return the ids dropped in the best solution with these cuts, and the lower bound in seconds."""
    step, unit = recipes.step, best / _UNITS
    delay_max = (best * (1 + _SPARE) - step.compute_seconds) / unit
    program = Program()
    ready = [program.variable(at / unit, at / unit + delay_max) for at in step.clock]
    start = [program.variable(at / unit, at / unit + delay_max) for at in step.clock[:-1]]
    swapped = [program.variable(0.0, 1.0, integer=True) for _ in range(step.count)]
    dropped = {i: program.variable(0.0, 1.0, integer=True) for i in recipes.seconds}
    for i, column in dropped.items():
        program.require([(-1.0, swapped[i]), (-1.0, column)], -1.0)
    runs = _add_runs(program, recipes, dropped)
    _add_node_rows(program, recipes, dropped, runs, ready, start, unit)
    released: dict[int, int] = {}  # for each tensor, the variable at the last cut that it covers
    prefetched: dict[int, int] = {}
    for k in cuts:
        covering = [i for i in range(step.count) if step.release_min[i] <= k < step.first_backward[i]]
        used = _used(program, recipes, dropped, k, covering)
        away: list[tuple[float, int]] = []
        gone: dict[int, int] = {}
        scale = float(max(step.bytes, default=1)) or 1.0
        for i in covering:
            here = [program.variable(0.0, 1.0, integer=True) for _ in range(2)]
            program.require([(1.0, swapped[i]), (-1.0, here[0])], 0.0)
            program.require([(1.0, here[0]), (-1.0, here[1])], 0.0)
            if i in released:
                program.require([(1.0, here[0]), (-1.0, released[i])], 0.0)
                program.require([(1.0, here[1]), (-1.0, prefetched[i])], 0.0)
            released[i], prefetched[i] = here
            away += [(step.bytes[i] / scale, here[0]), (-step.bytes[i] / scale, here[1])]
            if i in used:
                program.require([(-1.0, here[0]), (1.0, here[1]), (-1.0, used[i])], -1.0)
            if i in dropped:
                gone[i] = program.variable(0.0, 1.0)
                program.require([(1.0, dropped[i]), (-1.0, gone[i])], 0.0)
                if i in used:
                    program.require([(-1.0, gone[i]), (-1.0, used[i])], -1.0)
                away.append((step.bytes[i] / scale, gone[i]))
        program.require(away, int(excess[k]) / scale)
        _add_run_rows(program, recipes, runs, k, gone, {i: (released[i], prefetched[i]) for i in covering}, scale)
        add_copy_out_rows(program, step, k, {i: released[i] for i in covering}, swapped, (ready[k], start), unit)
        for use in sorted({step.first_backward[i] for i in covering}):
            back = [i for i in covering if step.first_backward[i] <= use]
            terms = [(-step.in_seconds[i] / unit, released[i]) for i in back]
            terms += [(step.in_seconds[i] / unit, prefetched[i]) for i in back]
            program.require([(1.0, start[use]), (-1.0, start[k]), *terms], step.seconds[k] / unit)
            made = [(-recipes.seconds[i] / unit, gone[i]) for i in back if i in gone]
            elapsed = (step.clock[use + 1] - step.clock[k]) / unit
            program.require([(1.0, ready[use + 1]), (-1.0, start[k]), *made], elapsed * (1 - 1e-12))
    solution = program.minimize(ready[-1], seconds_max, gap)
    if solution.values is None:
        return None, solution.bound * unit
    chosen = {step.ids[i] for i, column in dropped.items() if solution.values[column] > 0.5}
    return chosen, solution.bound * unit


def _add_node_rows(
    program: Program,
    recipes: _Recipes,
    dropped: dict[int, int],
    runs: Sequence[Sequence[int]],
    ready: Sequence[int],
    start: Sequence[int],
    unit: float,
) -> None:
    """Add constraint 4: nodes run one after another, each for its time and that of the recomputations there."""
    step = recipes.step
    at_node: list[list[tuple[float, int]]] = [[] for _ in range(step.node_count)]
    for (chain, each), columns in zip(recipes.chains, runs, strict=True):
        for run, column in zip(each, columns, strict=True):
            for k, seconds in recipes.seconds_of(chain, run).items():
                at_node[k].append((-seconds / unit, column))
    for k, terms in enumerate(at_node):
        program.require([(1.0, ready[k + 1]), (-1.0, start[k]), *terms], step.seconds[k] / unit)
    spans: dict[tuple[int, int], list[int]] = {(0, step.node_count - 1): []}
    for i in dropped:
        if recipes.earliest[i] < step.first_backward[i]:
            spans.setdefault((recipes.earliest[i], step.first_backward[i]), [])
    for (first, last), inside in spans.items():
        inside += [i for i in dropped if first <= recipes.earliest[i] and step.first_backward[i] <= last]
        seconds = (step.clock[last + 1] - step.clock[first]) * (1 - 1e-12)
        made = [(-recipes.seconds[i] / unit, dropped[i]) for i in inside]
        program.require([(1.0, ready[last + 1]), (-1.0, start[first]), *made], seconds / unit)
    for k in range(step.node_count):
        program.require([(1.0, start[k]), (-1.0, ready[k])], 0.0)


def _used(
    program: Program, recipes: _Recipes, dropped: dict[int, int], k: int, covering: Iterable[int]
) -> dict[int, int]:
    """Add constraint 2 for the cut k; return for each covering tensor the variable that states its use."""
    uses = recipes.step.first_backward
    used = {i: program.variable(0.0, 1.0) for i in covering if i in recipes.makes}
    for i, column in used.items():
        for made in recipes.makes[i]:
            if uses[made] <= k:
                program.require([(1.0, column), (-1.0, dropped[made])], 0.0)
            elif made in used:
                program.require([(1.0, column), (-1.0, dropped[made]), (-1.0, used[made])], -1.0)
    return used


def _add_runs(program: Program, recipes: _Recipes, dropped: dict[int, int]) -> list[list[int]]:
    """Add constraint 5; return for each chain's runs the variables that state whether the plan has them."""
    variables = []
    for chain, runs in recipes.chains:
        columns = [program.variable(0.0, 1.0) for _ in runs]
        for place in range(-1, len(chain) + 1):
            stays = [(1.0, dropped[chain[place]])] if 0 <= place < len(chain) and chain[place] in dropped else []
            before = [(1.0, column) for run, column in zip(runs, columns, strict=True) if run.end == place]
            behind = [(1.0, column) for run, column in zip(runs, columns, strict=True) if run.first == place + 1]
            for terms in ([before] if place >= 0 else []) + ([behind] if place < len(chain) else []):
                program.require(stays + terms, 1.0)
                program.require([(-value, column) for value, column in stays + terms], -1.0)
        variables.append(columns)
    return variables


def _add_run_rows(
    program: Program,
    recipes: _Recipes,
    runs: Sequence[Sequence[int]],
    k: int,
    gone: dict[int, int],
    swapped: dict[int, tuple[int, int]],
    scale: float,
) -> None:
    """Add constraint 6 for the cut k: a run's first use has brought it back, and needs the tensor before it."""
    step = recipes.step
    for (chain, each), columns in zip(recipes.chains, runs, strict=True):
        freed: list[tuple[float, int]] = []
        used: dict[int, list[tuple[float, int]]] = {}
        for run, column in zip(each, columns, strict=True):
            members = zip(chain[run.first : run.end], run.at, strict=True)
            size = sum(step.bytes[i] for i, at in members if i in gone and k < at)
            if size:
                freed.append((size / scale, column))
            if run.first and run.at and run.at[0] <= k:
                used.setdefault(chain[run.first - 1], []).append((-1.0, column))
        terms = [(-step.bytes[i] / scale, gone[i]) for i in chain if i in gone]
        if terms:
            program.require(terms + freed, 0.0)
        for i, columns_of in used.items():
            if i in swapped:
                released, prefetched = swapped[i]
                program.require([(-1.0, released), (1.0, prefetched), *columns_of], -1.0)
