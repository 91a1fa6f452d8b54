"""Searches for the set of tensors to recompute; for each set, `swap_search` chooses the tensors to swap.

Recomputing some tensors of a step gives another step (`recompute`), whose swaps are planned as those of any step. If
there are few candidates, every set is tried. Otherwise tensors are dropped one after the other, the cheapest first. A
tensor is left out if no plan could then keep the limit, because of the memory that its recomputation takes. Prefixes of
this order are compared; this is done for three measures of cost. Local search then adds, removes and exchanges dropped
tensors at random; about half of those that it adds are close to a stall.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from offload.plan.drop_set import DropSet
from offload.plan.joint_step import JointSteps
from offload.plan.local_search import Neighbourhood, SearchBudget, improve
from offload.plan.placement import Step, SwapPlacement
from offload.plan.simulate import Link, unswapped_bytes
from offload.plan.swap_search import ROUNDING, fastest_placement, minimal_set, rankings
from offload.plan.trace import SavedTensor, Trace

__all__ = ["JointPlacement", "fastest_joint", "small_share"]

_ALL_SETS_MAX = 8  # candidates; 256 sets
_EXHAUSTIVE_MAX = 8  # tensors that may be swapped; up to this number, every set of swaps is tried
_PROBE_SECONDS = 0.01  # estimated seconds to choose the swaps of one set, for up to 1,000 tensors; see `small_share`
_SMALL = 10_000  # tensors times nodes; a step with a smaller product gets less time
_PREFIX_SHARE = 0.2  # share of the budget for each order
_FLIP_SHARE = 0.8  # share of the remaining budget for the local search, `flips`; the rest is for `polished`
_POLISH_SHARE = 0.25  # most time for improving the swaps, relative to the time of the search for the set
_PATIENCE = 16  # local search ends after this many sets per candidate without a gain, if the gap is _PATIENCE_GAP
_PATIENCE_GAP = 0.01  # gap: step time relative to the target, minus 1; the patience is proportional to it
_PATIENCE_FACTORS = (0.1, 2.0)  # least and largest factor by which the gap changes the patience
_CLOSE = 0.005  # if the gap is at most this, no further order is tried
_GAIN = 1e-4  # relative gain in step time; a smaller one counts as none
_FIRST_PREFIXES = (1.0, 0.75, 0.5, 0.25)
_RANKINGS = 3  # after some changes of the dropped set, this many of `rankings` give a `minimal_set` of swaps to try
_NEAR = 0.1  # share of the nodes: a tensor is close to a stall if it is used so near to the use that waits
_IDLE_MAX = 300  # consecutive changes without an improvement; then the search starts again near the best set
_KICKS = 6  # random changes from the best set to the new start
_KICK_SLOWDOWN = 1.1  # step time of the new start, at most, relative to the best one


@dataclass(frozen=True, slots=True)
class JointPlacement:
    """Tensors to recompute, the step with these recomputations, and the placement of its swaps.

    Parameters
    ----------
    dropped : frozenset of int
        Ids of the tensors that are recomputed.
    step : Step
        The step in which these tensors are recomputed.
    placement : SwapPlacement
        The swaps of this step.
    """

    dropped: frozenset[int]
    step: Step
    placement: SwapPlacement

    @property
    def step_seconds(self) -> float:
        """Step time, including the overhead of the swaps."""
        return self.placement.step_seconds

    @property
    def swapped(self) -> list[int]:
        """Ids of the swapped tensors."""
        return [self.step.ids[i] for i in self.placement.indices]


def fastest_joint(
    trace: Trace,
    link: Link,
    limit_bytes: int,
    start: JointPlacement,
    target_seconds: float,
    budget: SearchBudget,
    *,
    guess: Collection[int] = (),
) -> JointPlacement:
    """Return a placement within the limit that is at least as fast as `start`.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths, latency and overheads.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    start : JointPlacement
        A placement within the limit; the fastest one found without recomputation.
    target_seconds : float
        Step time at which the search ends, in seconds.
    budget : SearchBudget
        Reduced by the time that the search uses.
    guess : collection of int, optional
        Ids of tensors that are tried first, for example the result for a similar limit.
    """
    target_seconds *= 1 + ROUNDING
    search = _JointSearch(trace, link, limit_bytes, target_seconds)
    if not search.candidates or start.step_seconds <= target_seconds:
        return start
    best, begin_seconds = start, budget.seconds
    if guess:
        best = search.placed(search.grown(guess), best.step_seconds, budget) or best
    if len(search.candidates) <= budget.exhaustive(_ALL_SETS_MAX):
        best = search.every_set(best, budget)
    else:
        share = _PREFIX_SHARE * budget.seconds
        for order in search.orders():
            if best.step_seconds <= target_seconds * (1 + _CLOSE):
                break
            part = budget.part(share)
            best = search.prefixes(best, order, part)
            budget.seconds -= share - part.seconds
        flips = budget.part(_FLIP_SHARE * budget.seconds)
        budget.seconds -= flips.seconds
        best = search.flips(best, flips)
        budget.seconds += flips.seconds
    polish = budget.part(min(budget.seconds, _POLISH_SHARE * (begin_seconds - budget.seconds)))
    return best if best is start else search.polished(best, polish)


def small_share(trace: Trace) -> float:
    """Return the share of its budget that a quick search may use: less than 1 for a small step."""
    return min(1.0, len(trace.tensors) * len(trace.nodes) / _SMALL)


class _JointSearch:
    """The search for one step, link and limit."""

    def __init__(self, trace: Trace, link: Link, limit_bytes: int, target_seconds: float) -> None:
        self.trace, self.link, self.limit_bytes, self.target_seconds = trace, link, limit_bytes, target_seconds
        self.tensors = {tensor.id: tensor for tensor in trace.tensors}
        over = [k for k, count in enumerate(unswapped_bytes(trace)) if count > limit_bytes]
        first, last = (over[0], over[-1]) if over else (0, -1)
        self.candidates = [
            tensor.id
            for tensor in sorted(trace.tensors, key=lambda x: (_price(x), x.produced, x.id))
            if tensor.recompute and tensor.bytes and tensor.last_forward < last and tensor.first_backward > first
        ]
        self.random = random.Random(0)
        self._steps = JointSteps(trace, link)
        self._probe_seconds = _PROBE_SECONDS * max(1.0, len(trace.tensors) / 1000) * small_share(trace)

    def grown(self, order: Iterable[int]) -> frozenset[int]:
        """Return the tensors that can be dropped within the limit if they are added one by one in this order."""
        drops = DropSet(self.trace, self.limit_bytes)
        return frozenset(i for i in order if drops.add(i))

    def orders(self) -> Iterator[list[int]]:
        """Yield the candidates in three orders: by recomputation time per byte, per byte and node, and in total.

        The nodes are those from a tensor's last use in forward to its first use in backward.
        """
        tensors = self.tensors
        yield self.candidates
        yield sorted(self.candidates, key=lambda i: _price(tensors[i]) / _away(tensors[i]))
        yield sorted(self.candidates, key=lambda i: _seconds(tensors[i]))

    def placed(self, dropped: frozenset[int], cutoff_seconds: float, budget: SearchBudget) -> JointPlacement | None:
        """Return the fastest placement found with a set dropped; None if it is not faster than the cutoff."""
        step = self._step(dropped, budget)
        if step is None or step.compute_seconds >= cutoff_seconds:
            return None
        probe = budget.part(self._probe_seconds)
        found = fastest_placement(step, self.limit_bytes, self.target_seconds, probe, _EXHAUSTIVE_MAX)
        budget.seconds -= self._probe_seconds - probe.seconds
        return JointPlacement(dropped, step, found) if found and found.step_seconds < cutoff_seconds else None

    def every_set(self, best: JointPlacement, budget: SearchBudget) -> JointPlacement:
        """Try every set of candidates; sets with the least recomputation time first."""
        sets = [each for count in range(1, len(self.candidates) + 1) for each in combinations(self.candidates, count)]
        sets.sort(key=lambda ids: sum(_seconds(self.tensors[i]) for i in ids))
        for ids in sets:
            best = self.placed(frozenset(ids), best.step_seconds, budget) or best
            if best.step_seconds <= self.target_seconds:
                break
        return best

    def prefixes(self, best: JointPlacement, order: Sequence[int], budget: SearchBudget) -> JointPlacement:
        """Try prefixes of an order: first a few, then those halfway between the fastest and its neighbours."""
        drops = DropSet(self.trace, self.limit_bytes)
        chain = [i for i in order if drops.add(i)]
        seconds = {0: best.step_seconds}
        waiting = [round(part * len(chain)) for part in _FIRST_PREFIXES]
        while waiting:
            for count in waiting:
                found = self.placed(frozenset(chain[:count]), math.inf, budget) if budget.seconds > 0 else None
                seconds[count] = found.step_seconds if found else math.inf
                best = found if found and found.step_seconds < best.step_seconds else best
            if budget.seconds <= 0 or best.step_seconds <= self.target_seconds:
                break
            tried = sorted(seconds)
            at = tried.index(min(tried, key=seconds.__getitem__))
            beside = [(tried[i] + tried[i + 1]) // 2 for i in (at - 1, at) if 0 <= i < len(tried) - 1]
            waiting = [count for count in beside if count not in seconds]
        return best

    def flips(self, best: JointPlacement, budget: SearchBudget) -> JointPlacement:
        """Make small changes that do not slow down the step; after many without gain, start again near the best set."""
        seen = {best.dropped}
        current, idle = best, 0
        useless, known_seconds = 0, best.step_seconds  # sets tried since the last gain, and the step time after it
        while budget.seconds > 0 and best.step_seconds > self.target_seconds and useless < self._patience(best):
            budget.seconds -= 3e-5
            idle += 1
            if idle > _IDLE_MAX:
                current, idle = self._kicked(best, budget), 0
            dropped = self._changed(current)
            if dropped in seen:
                continue
            seen.add(dropped)
            useless += 1
            found = self._adapted(current, dropped, current.step_seconds, budget)
            if found is not None:
                idle = 0 if found.step_seconds < current.step_seconds else idle
                current = found
                best = current if current.step_seconds < best.step_seconds else best
                if best.step_seconds < known_seconds * (1 - _GAIN):
                    useless, known_seconds = 0, best.step_seconds
        return best

    def _patience(self, best: JointPlacement) -> float:
        """Return how many sets may be tried without a gain: more if the best set is further from the target."""
        gap = best.step_seconds / self.target_seconds - 1 if self.target_seconds else 1.0
        low, high = _PATIENCE_FACTORS
        return _PATIENCE * len(self.candidates) * min(high, max(low, gap / _PATIENCE_GAP))

    def _kicked(self, best: JointPlacement, budget: SearchBudget) -> JointPlacement:
        """Return a placement that differs from `best` by some random changes."""
        kicked = best
        for _ in range(_KICKS):
            dropped = self._changed(kicked)
            if dropped != kicked.dropped:
                kicked = self._adapted(kicked, dropped, _KICK_SLOWDOWN * best.step_seconds, budget) or kicked
        return kicked

    def polished(self, best: JointPlacement, budget: SearchBudget) -> JointPlacement:
        """Improve the swaps of a set."""
        placements = [best.placement]
        for _ in range(2):
            share = budget.part(budget.seconds / 2)
            if len(placements) == 1:
                placements.append(improve(best.step, self.limit_bytes, best.placement, self.target_seconds, share))
            elif (found := fastest_placement(best.step, self.limit_bytes, self.target_seconds, share, 0)) is not None:
                placements.append(found)
        fastest = min(placements, key=lambda placement: placement.step_seconds)
        return JointPlacement(best.dropped, best.step, fastest)

    def _step(self, dropped: frozenset[int], budget: SearchBudget) -> Step | None:
        """Return the step with a set dropped; None if no plan of it stays within the limit."""
        step = self._steps.step(dropped)
        budget.seconds -= 1.5e-6 * step.node_count + 3e-6 * step.count
        return step if int(step.headroom(range(step.count), self.limit_bytes).min()) >= 0 else None

    def _changed(self, best: JointPlacement) -> frozenset[int]:
        """Return the dropped set of `best`, with one or two tensors changed at random.

        Unchanged if the kind of change that was drawn is not possible.
        """
        rng = self.random
        dropped = set(best.dropped)
        more = self._addable(best)
        kind = rng.random()
        if kind < 0.35:
            if more:
                dropped.add(rng.choice(more))
        elif kind < 0.9:
            if dropped:
                gone = rng.choice(sorted(dropped))
                dropped.remove(gone)
                if more and kind >= 0.6:
                    dropped.add(self._beside(gone, more) if rng.random() < 0.5 else rng.choice(more))
        else:
            dropped ^= set(rng.sample(self.candidates, 2))
        return frozenset(dropped)

    def _addable(self, best: JointPlacement) -> list[int]:
        """Return candidates that may be dropped in addition.

        It is random which are returned: all that are not dropped, or only those that are swapped; and of these all, or
        only those near a stall.
        """
        rng = self.random
        among = set(best.swapped) if rng.random() < 0.6 else set(self.candidates) - best.dropped
        pool = [i for i in self.candidates if i in among]
        stalls = best.placement.stalls
        if stalls and rng.random() < 0.5:
            stall = rng.choices(stalls, weights=[stall.seconds for stall in stalls])[0]
            use = best.step.first_backward[stall.tensor]
            far = _NEAR * len(self.trace.nodes)
            near = [i for i in pool if abs(self.tensors[i].first_backward - use) < far]
            pool = near or pool
        return pool

    def _beside(self, gone: int, pool: Iterable[int]) -> int:
        """Return a tensor of the pool that is produced close to where tensor `gone` is."""
        at = self.tensors[gone].produced
        return min(pool, key=lambda i: (abs(self.tensors[i].produced - at) + 3 * self.random.random(), i))

    def _adapted(
        self, near: JointPlacement, dropped: frozenset[int], cutoff_seconds: float, budget: SearchBudget
    ) -> JointPlacement | None:
        """Return a placement with a set dropped and swaps similar to those of `near`; None if it exceeds the cutoff."""
        step = self._step(dropped, budget)
        if step is None or step.compute_seconds > cutoff_seconds:
            return None
        place = {tensor_id: i for i, tensor_id in enumerate(step.ids)}
        beside = Neighbourhood(step, self.limit_bytes, self.random)
        sets = [beside.adapted([place[i] for i in near.swapped if i in place])]
        if self.random.random() < 0.3:
            sets += [minimal_set(step, each, self.limit_bytes) for each in rankings(step)[:_RANKINGS]]
        found = None
        for indices in sets:
            if indices is None:
                continue
            budget.spend(step, len(indices))
            placement = step.place(indices, self.limit_bytes, cutoff_seconds)
            if placement is not None and placement.step_seconds <= cutoff_seconds:
                found, cutoff_seconds = JointPlacement(dropped, step, placement), placement.step_seconds
        return found


def _seconds(tensor: SavedTensor) -> float:
    return tensor.recompute.seconds if tensor.recompute else math.inf


def _price(tensor: SavedTensor) -> float:
    return _seconds(tensor) / max(tensor.bytes, 1)


def _away(tensor: SavedTensor) -> int:
    return tensor.first_backward - tensor.last_forward
