"""Local search over the set of tensors to swap: small random changes to a good set."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from offload.plan.placement import Ints, Stall, Step, SwapPlacement

__all__ = ["Neighbourhood", "SearchBudget", "delay_prefetches", "improve"]

_EARLY = 4.0  # a safety factor with which copy-ins are queued much earlier than necessary
_SAFETY_FACTORS = (1.0, 1.0, _EARLY)
_DELAY_SHARE = 0.2  # share of the changes that delay a prefetch
_NEAR = 10  # positions in a copy queue: a tensor to remove is so close to a stall, one to add up to three times as far
_REPAIRS_MAX = 40  # tensors added to bring one change within the limit
_PRUNINGS_MAX = 40  # tensors tried for removal after one change
_DELAYS_MAX = 8  # rounds of `delay_prefetches`, each of which delays at most one more tensor
_IDLE_MAX = 400  # consecutive changes that give neither a new set nor a delay; then the search ends


@dataclass(slots=True)
class SearchBudget:
    """Estimated seconds that the search may still use. Estimated, not measured, so that plans are deterministic.

    `effort`: the share of the usual search that it allows, at most 1.
    """

    seconds: float
    effort: float = 1.0

    def part(self, seconds: float) -> SearchBudget:
        """Return another budget with the same effort."""
        return SearchBudget(seconds, self.effort)

    def exhaustive(self, count_max: int) -> int:
        """Return the number of tensors up to which every set is tried.

        It is `count_max` with the full effort, and one less each time that the effort is halved.
        """
        return count_max + math.floor(math.log2(self.effort)) if self.effort > 0 else 0

    def spend(self, step: Step, swap_count: int) -> None:
        """Subtract the cost of one placement."""
        self.seconds -= 2e-5 + 4e-7 * step.node_count + (6e-6 + 4e-10 * step.node_count) * swap_count


def improve(
    step: Step,
    limit_bytes: int,
    placement: SwapPlacement,
    target_seconds: float,
    budget: SearchBudget,
    *,
    seed: int = 0,
) -> SwapPlacement:
    """Return a placement that is at least as fast.

    Parameters
    ----------
    step : Step
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes; `placement` stays within it.
    placement : SwapPlacement
        Start of the search.
    target_seconds : float
        Step time at which the search ends, in seconds.
    budget : SearchBudget
        Reduced by the time that the search uses.
    seed : int, default 0
        Seed of the random changes.

    Notes
    -----
    A change removes up to two tensors from the set, adds one, or does both, close to a stall or anywhere. It then adds
    tensors until the set stays within the limit, and in half of the cases removes tensors that the limit does not
    require. One change in five delays a prefetch instead, so that another tensor can be prefetched earlier. A placement
    that is as fast as the current one is accepted too, so that the search can cross plateaus.
    """
    near = Neighbourhood(step, limit_bytes, random.Random(seed))
    near.move_to(placement)
    seen = {placement.indices}
    idle = 0
    while budget.seconds > 0 and placement.step_seconds > target_seconds and idle < _IDLE_MAX:
        budget.seconds -= 3e-5
        idle += 1
        not_before = placement.not_before
        if near.random.random() < _DELAY_SHARE:
            choice = list(_delays(step, placement, near.sample_stall(placement.stalls, is_out=False)))
            if not choice:
                continue
            indices, not_before = placement.indices, near.random.choice(choice)
        else:
            proposed = near.propose(placement.stalls)
            if proposed is None or proposed in seen:
                continue
            indices = proposed
            seen.add(indices)
        idle = 0
        budget.spend(step, len(indices))
        safety_factor = near.random.choice(_SAFETY_FACTORS)
        found = step.place(
            indices, limit_bytes, placement.step_seconds, safety_factor=safety_factor, not_before=not_before
        )
        if found is not None and found.step_seconds <= placement.step_seconds:
            placement = found
            near.move_to(placement)
    return placement


def delay_prefetches(
    step: Step, limit_bytes: int, placement: SwapPlacement, cutoff_seconds: float, budget: SearchBudget
) -> SwapPlacement:
    """Return a placement that is at least as fast: with some prefetches delayed, or with copy-ins queued earlier.

    It has the same tensors, without those that then save no memory.

    Parameters
    ----------
    step : Step
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    placement : SwapPlacement
        Start of the search.
    cutoff_seconds : float
        Step time that is too long, in seconds. If it is reached even without waits for copy-ins, nothing is tried.
    budget : SearchBudget
        Reduced by the time that the search uses.
    """
    in_seconds = sum(stall.seconds for stall in placement.stalls if not stall.is_out)
    if placement.step_seconds - in_seconds >= cutoff_seconds:
        return placement
    for _ in range(_DELAYS_MAX):
        stalls = sorted(placement.stalls, key=lambda stall: -stall.seconds)
        choices = product((placement.not_before, *_delays(step, placement, stalls)), (1.0, _EARLY))
        for not_before, safety_factor in choices:
            if budget.seconds < 0:
                return placement
            budget.spend(step, len(placement.indices))
            found = step.place(placement.indices, limit_bytes, not_before=not_before, safety_factor=safety_factor)
            if found is not None and found.step_seconds < placement.step_seconds * (1 - 1e-12):
                placement = found
                break
        else:
            break
    return placement


def _delays(step: Step, placement: SwapPlacement, stalls: Sequence[Stall]) -> Iterator[dict[int, int]]:
    """Yield values of `not_before` that free memory for the late tensor of a stall.

    The node before this tensor's prefetch node usually has no room for it: otherwise the tensor would be prefetched
    there. So each other tensor that is prefetched at that node or before it, and used after it, is a candidate for a
    later prefetch.
    """
    if not stalls:
        return
    prefetches = dict(zip(placement.indices, placement.prefetches, strict=True))
    releases = dict(zip(placement.indices, placement.releases, strict=True))
    for stall in stalls:
        k = prefetches[stall.tensor] - 1
        if stall.is_out or k < releases[stall.tensor]:
            continue
        for i in placement.indices:
            if i != stall.tensor and prefetches[i] <= k < step.first_backward[i]:
                yield {**placement.not_before, i: k + 1}


class Neighbourhood:
    """Proposes sets that differ a little from the current one."""

    def __init__(self, step: Step, limit_bytes: int, rng: random.Random) -> None:
        self.step, self.limit_bytes, self.random = step, limit_bytes, rng
        self._release_min, self._first_backward = np.asarray(step.release_min), np.asarray(step.first_backward)
        self._sizes, self._rank = np.asarray(step.bytes, dtype=np.int64), np.asarray(step.copy_in_rank)

    def move_to(self, placement: SwapPlacement) -> None:
        """Make the set of `placement` the current one."""
        self.indices = placement.indices
        self.swapped = np.zeros(self.step.count, dtype=bool)
        self.swapped[list(self.indices)] = True
        self.kept = np.flatnonzero(~self.swapped).tolist()
        self.headroom = self.step.headroom(self.indices, self.limit_bytes)

    def sample_stall(self, stalls: Sequence[Stall], *, is_out: bool) -> Sequence[Stall]:
        """Return one stall of a kind, with a probability proportional to its length; empty if there is none."""
        among = [stall for stall in stalls if stall.is_out == is_out]
        return self.random.choices(among, weights=[stall.seconds for stall in among]) if among else ()

    def propose(self, stalls: Sequence[Stall]) -> tuple[int, ...] | None:
        """Return a set that stays within the limit, or None if this attempt found none."""
        removable, addable = self._candidates(stalls)
        kind = self.random.random()
        removed: set[int] = set()
        added: set[int] = set()
        if kind < 0.7 and removable:
            removed.add(self.random.choice(removable))
            if kind < 0.2:
                removed.add(self.random.choice(removable))
        if addable and (not removed or self.random.random() < 0.4):
            added.add(self.random.choice(addable))
        swapped, headroom = self.swapped.copy(), self.headroom.copy()
        for i in removed:
            self._toggle(i, headroom, swapped)
        for i in added:
            self._toggle(i, headroom, swapped)
        if not self._repair(headroom, swapped, removed):
            return None
        if self.random.random() < 0.5:
            self._prune(headroom, swapped, added)
        return tuple(np.flatnonzero(swapped).tolist())

    def adapted(self, indices: Iterable[int]) -> list[int] | None:
        """Return a set that is close to `indices` and stays within the limit; None if this attempt found none."""
        swapped = np.zeros(self.step.count, dtype=bool)
        swapped[list(indices)] = True
        headroom = self.step.headroom(np.flatnonzero(swapped).tolist(), self.limit_bytes)
        if not self._repair(headroom, swapped, ()):
            return None
        self._prune(headroom, swapped, ())
        found: list[int] = np.flatnonzero(swapped).tolist()
        return found

    def _candidates(self, stalls: Sequence[Stall]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the swapped tensors that may be removed and the kept ones that may be added."""
        if not stalls or self.random.random() < 0.4:
            return self.indices, self.kept
        stall = self.random.choices(stalls, weights=[stall.seconds for stall in stalls])[0]
        if stall.is_out:
            queue: Sequence[int] = range(self.step.count)
            at = stall.tensor
        else:
            queue = self.step.copy_in_order
            at = self.step.copy_in_rank[stall.tensor]
        low = max(0, at - _NEAR)
        removable = [i for i in queue[low : at + 3] if self.swapped[i]]
        near = queue[max(0, at - 3 * _NEAR) : at + _NEAR] if stall.is_out else queue[low : at + 3 * _NEAR]
        return removable, [i for i in near if not self.swapped[i]]

    def _toggle(self, i: int, headroom: Ints, swapped: NDArray[np.bool_]) -> None:
        """Add a kept tensor to the set, or remove a swapped one from it."""
        count = self.step.bytes[i]
        headroom[self.step.release_min[i] : self.step.first_backward[i]] += -count if swapped[i] else count
        swapped[i] = not swapped[i]

    def _repair(self, headroom: Ints, swapped: NDArray[np.bool_], banned: Iterable[int]) -> bool:
        """Add tensors until the set stays within the limit; return whether it does."""
        rule = self.random.random()
        allowed = ~swapped
        allowed[list(banned)] = False
        for _ in range(_REPAIRS_MAX):
            k = int(headroom.argmin()) if headroom.size else 0
            missing = -int(headroom[k]) if headroom.size else 0
            if missing <= 0:
                return True
            choice = np.flatnonzero(allowed & (self._release_min <= k) & (k < self._first_backward))
            if not choice.size:
                return False
            if rule < 0.4:  # the smallest tensor that is large enough; if there is none, the largest
                enough = choice[self._sizes[choice] >= missing]
                i = enough[self._sizes[enough].argmin()] if enough.size else choice[self._sizes[choice].argmax()]
            elif rule < 0.6:  # the tensor that was packed first
                i = choice[0]
            elif rule < 0.8:  # the tensor that backward needs last
                i = choice[self._rank[choice].argmax()]
            else:
                i = choice[self.random.randrange(choice.size)]
            self._toggle(int(i), headroom, swapped)
            allowed[i] = False
        return False

    def _prune(self, headroom: Ints, swapped: NDArray[np.bool_], added: Iterable[int]) -> None:
        """In random order, remove tensors from the set if the limit allows it, except those in `added`."""
        choice = [i for i in np.flatnonzero(swapped).tolist() if i not in added]
        for i in self.random.sample(choice, min(len(choice), _PRUNINGS_MAX)):
            span = headroom[self.step.release_min[i] : self.step.first_backward[i]]
            if not span.size or int(span.min()) >= self.step.bytes[i]:
                self._toggle(i, headroom, swapped)
