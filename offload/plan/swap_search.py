"""Searches for the set of tensors to swap within a limit.

`placement` chooses the nodes of each set, and `search` makes plans from the result.

The first sets come from a few rankings of the tensors (by lifetime, by pack order, by first use in backward, by idle
time times bytes, by bytes). Each ranking gives its shortest prefix that stays within the limit, longer prefixes, and a
minimal set that stays within the limit. Local search then improves the fastest set. If there are few tensors, every set
is tried instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from offload.plan.local_search import SearchBudget, delay_prefetches, improve
from offload.plan.placement import Step, SwapPlacement

__all__ = ["ROUNDING", "fastest_placement", "minimal_set", "rankings"]

ROUNDING = 1e-12  # relative difference between step times that counts as rounding
_STARTS = 2  # independent runs of the local search


def fastest_placement(
    step: Step, limit_bytes: int, target_seconds: float, budget: SearchBudget, exhaustive_max: int
) -> SwapPlacement | None:
    """Return the fastest placement found; the search ends if one takes at most `target_seconds`."""
    if step.unswapped_bytes.max(initial=0) <= limit_bytes:
        return SwapPlacement(step.compute_seconds, (), (), (), ())
    target_seconds *= 1 + ROUNDING
    small = step.count <= budget.exhaustive(exhaustive_max)
    best: SwapPlacement | None = None
    for indices in _subsets(step.count) if small else _first_sets(step, limit_bytes):
        cutoff = best.step_seconds if best else math.inf
        found = step.place(indices, limit_bytes, cutoff)
        if found is not None and small:
            found = delay_prefetches(step, limit_bytes, found, cutoff, budget)
        budget.spend(step, len(indices))
        if found is not None and (best is None or found.step_seconds < best.step_seconds):
            best = found
            if best.step_seconds <= target_seconds:
                break
        if not small and best is not None and budget.seconds < 0:
            break
    if best is None or small:
        return best
    start, share = best, budget.seconds / _STARTS
    for seed in range(_STARTS):
        if best.step_seconds <= target_seconds:
            break
        improved = improve(step, limit_bytes, start, target_seconds, budget.part(share), seed=seed)
        best = min(best, improved, key=lambda placement: placement.step_seconds)
    return best


def _subsets(count: int) -> Iterator[list[int]]:
    """Yield every set of tensors, in the order of binary counting."""
    for mask in range(1 << count):
        yield [i for i in range(count) if mask >> i & 1]


def _first_sets(step: Step, limit_bytes: int) -> Iterator[Sequence[int]]:
    """Yield the sets that the search begins with, the most promising first."""
    prefixes = []
    for ranking in rankings(step):
        length = _least_prefix(step, ranking, limit_bytes)
        prefixes.append((ranking, length))
        yield ranking[:length]
    for ranking, length in prefixes:
        yield minimal_set(step, ranking, limit_bytes)
        rest = step.count - length
        for more in sorted({2, 5, 10, rest // 8, rest // 3}):
            if 0 < more <= rest:
                yield ranking[: length + more]


def rankings(step: Step) -> list[list[int]]:
    """Return the tensors in the orders of several criteria; in the first order, the longest-lived come first."""
    everything = range(step.count)
    idle = [step.clock[step.first_backward[i]] - step.clock[step.packed[i] + 1] for i in everything]
    return [
        sorted(everything, key=lambda i: (step.release_min[i] - step.first_backward[i], i)),
        list(everything),
        sorted(everything, key=lambda i: (-step.first_backward[i], i)),
        sorted(everything, key=lambda i: (-idle[i] * step.bytes[i], i)),
        sorted(everything, key=lambda i: (-step.bytes[i], i)),
    ]


def _least_prefix(step: Step, ranking: Sequence[int], limit_bytes: int) -> int:
    """Return the length of the shortest prefix that stays within the limit; the full length if none does."""
    low, high = 0, len(ranking)
    while low < high:
        middle = (low + high) // 2
        if int(step.headroom(ranking[:middle], limit_bytes).min()) >= 0:
            high = middle
        else:
            low = middle + 1
    return low


def minimal_set(step: Step, ranking: Sequence[int], limit_bytes: int) -> list[int]:
    """Return a minimal set: starting with all tensors, each that the limit does not require is removed, last first."""
    headroom = step.headroom(ranking, limit_bytes)
    needed = []
    for i in reversed(ranking):
        span = headroom[step.release_min[i] : step.first_backward[i]]
        if span.size and int(span.min()) < step.bytes[i]:
            needed.append(i)
        else:
            span -= step.bytes[i]
    return needed
