"""Better sets of tensors to swap, found by small seeded changes to a good one.

Place on the data path: inside the search, between its first guess and its answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from offload.plan.placement import Ints, Schedule, Stall, Step

__all__ = ["Effort", "improve", "reorder"]

_EAGER = 4.0  # a lead at which copy-ins begin well before they must
_LEADS = (1.0, 1.0, _EAGER)
_HOLD_SHARE = 0.2  # of the changes
_NEAR = 10  # places in a channel's queue that count as close to a stall
_REPAIRS_MAX = 40  # tensors added to make one change fit
_TRIMS_MAX = 40  # tensors tried for leaving out after one change
_HOLDS_MAX = 8  # tensors held back in one schedule
_IDLE_MAX = 400  # changes in a row that lead to nothing new, after which the search ends


@dataclass(slots=True)
class Effort:
    """What the search may still spend, in nominal seconds: counted, not measured, so that plans are deterministic."""

    seconds: float

    def spend(self, step: Step, swap_count: int) -> None:
        """Take off the price of one schedule."""
        self.seconds -= 2e-5 + 4e-7 * step.node_count + (6e-6 + 4e-10 * step.node_count) * swap_count


def improve(
    step: Step, limit_bytes: int, schedule: Schedule, target_seconds: float, effort: Effort, *, seed: int = 0
) -> Schedule:
    """Return a schedule that is at least as fast.

    Parameters
    ----------
    step : Step
        The step.
    limit_bytes : int
        Limit on the resident bytes, which `schedule` keeps.
    schedule : Schedule
        Where to start.
    target_seconds : float
        Step time that is good enough.
    effort : Effort
        What may be spent; the rest is left in it.
    seed : int, default 0
        Of the changes tried.

    Notes
    -----
    One change drops one or two tensors from the set, or adds one, next to a stall or anywhere; then adds what it
    takes to keep the limit, and half the time leaves out what the limit no longer needs. Or it holds one copy-in back
    for another's sake. A schedule that is not slower is kept, so that plateaus are crossed.
    """
    change = _Change(step, limit_bytes, random.Random(seed))
    change.settle(schedule)
    seen = {schedule.numbers}
    idle = 0
    while effort.seconds > 0 and schedule.step_seconds > target_seconds and idle < _IDLE_MAX:
        effort.seconds -= 3e-5
        idle += 1
        holds = schedule.holds
        if change.random.random() < _HOLD_SHARE:
            choice = list(_holdings(step, schedule, change.pick(schedule.stalls, is_out=False)))
            if not choice:
                continue
            numbers, holds = schedule.numbers, change.random.choice(choice)
        else:
            proposed = change.propose(schedule.stalls)
            if proposed is None or proposed in seen:
                continue
            numbers = proposed
            seen.add(numbers)
        idle = 0
        effort.spend(step, len(numbers))
        lead = change.random.choice(_LEADS)
        found = step.schedule(numbers, limit_bytes, schedule.step_seconds, lead=lead, holds=holds)
        if found is not None and found.step_seconds <= schedule.step_seconds:
            schedule = found
            change.settle(schedule)
    return schedule


def reorder(step: Step, limit_bytes: int, schedule: Schedule, worth_seconds: float, effort: Effort) -> Schedule:
    """Return a schedule of the same tensors that is at least as fast, by holding some copy-ins back.

    Parameters
    ----------
    step : Step
        The step.
    limit_bytes : int
        Limit on the resident bytes.
    schedule : Schedule
        Where to start.
    worth_seconds : float
        Step time beyond which nothing is wanted; where waits for copies out alone exceed it, nothing is tried.
    effort : Effort
        What may be spent; the rest is left in it.
    """
    back_seconds = sum(stall.seconds for stall in schedule.stalls if not stall.is_out)
    out_seconds = schedule.step_seconds - back_seconds
    if out_seconds >= worth_seconds:
        return schedule
    for _ in range(_HOLDS_MAX):
        stalls = sorted(schedule.stalls, key=lambda stall: -stall.seconds)
        for holds, lead in product((schedule.holds, *_holdings(step, schedule, stalls)), (1.0, _EAGER)):
            if effort.seconds < 0:
                return schedule
            effort.spend(step, len(schedule.numbers))
            found = step.schedule(schedule.numbers, limit_bytes, holds=holds, lead=lead)
            if found is not None and found.step_seconds < schedule.step_seconds * (1 - 1e-12):
                schedule = found
                break
        else:
            break
    return schedule


def _holdings(step: Step, schedule: Schedule, stalls: Sequence[Stall]) -> Iterator[dict[int, int]]:
    """Yield holds that let a late tensor return earlier.

    Its prefetch is where it is because its bytes do not fit one node before. Whichever tensor is back by then and not
    yet used could wait until after that node instead.
    """
    if not stalls:
        return
    prefetches = dict(zip(schedule.numbers, schedule.prefetches, strict=True))
    releases = dict(zip(schedule.numbers, schedule.releases, strict=True))
    for stall in stalls:
        k = prefetches[stall.number] - 1
        if stall.is_out or k < releases[stall.number]:
            continue
        for i in schedule.numbers:
            if i != stall.number and prefetches[i] <= k < step.back_at[i]:
                yield {**schedule.holds, i: k + 1}


class _Change:
    """Proposes sets near the present one."""

    def __init__(self, step: Step, limit_bytes: int, rng: random.Random) -> None:
        self.step, self.limit_bytes, self.random = step, limit_bytes, rng
        self._free_from, self._back_at = np.asarray(step.free_from), np.asarray(step.back_at)
        self._sizes, self._rank = np.asarray(step.bytes, dtype=np.int64), np.asarray(step.use_rank)

    def settle(self, schedule: Schedule) -> None:
        """Take the set of `schedule` as the present one."""
        self.numbers = schedule.numbers
        self.swapped = np.zeros(self.step.count, dtype=bool)
        self.swapped[list(self.numbers)] = True
        self.kept = np.flatnonzero(~self.swapped).tolist()
        self.room = self.step.room(self.numbers, self.limit_bytes)

    def pick(self, stalls: Sequence[Stall], *, is_out: bool) -> Sequence[Stall]:
        """Return one stall of a kind, or none; the longer, the likelier."""
        among = [stall for stall in stalls if stall.is_out == is_out]
        return self.random.choices(among, weights=[stall.seconds for stall in among]) if among else ()

    def propose(self, stalls: Sequence[Stall]) -> tuple[int, ...] | None:
        """Return a set that keeps the limit, or None if this attempt led to none."""
        leaving, joining = self._candidates(stalls)
        kind = self.random.random()
        drops: set[int] = set()
        adds: set[int] = set()
        if kind < 0.7 and leaving:
            drops.add(self.random.choice(leaving))
            if kind < 0.2:
                drops.add(self.random.choice(leaving))
        if joining and (not drops or self.random.random() < 0.4):
            adds.add(self.random.choice(joining))
        swapped, room = self.swapped.copy(), self.room.copy()
        for i in drops:
            self._move(i, room, swapped)
        for i in adds:
            self._move(i, room, swapped)
        if not self._repair(room, swapped, drops):
            return None
        if self.random.random() < 0.5:
            self._trim(room, swapped, adds)
        return tuple(np.flatnonzero(swapped).tolist())

    def _candidates(self, stalls: Sequence[Stall]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the swapped tensors that may leave the set and the kept ones that may join it."""
        if not stalls or self.random.random() < 0.4:
            return self.numbers, self.kept
        stall = self.random.choices(stalls, weights=[stall.seconds for stall in stalls])[0]
        if stall.is_out:
            queue: Sequence[int] = range(self.step.count)
            at = stall.number
        else:
            queue = self.step.by_use
            at = self.step.use_rank[stall.number]
        low = max(0, at - _NEAR)
        leaving = [i for i in queue[low : at + 3] if self.swapped[i]]
        reach = queue[max(0, at - 3 * _NEAR) : at + _NEAR] if stall.is_out else queue[low : at + 3 * _NEAR]
        return leaving, [i for i in reach if not self.swapped[i]]

    def _move(self, i: int, room: Ints, swapped: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Swap a tensor that was kept, or keep one that was swapped."""
        count = self.step.bytes[i]
        room[self.step.free_from[i] : self.step.back_at[i]] += -count if swapped[i] else count
        swapped[i] = not swapped[i]

    def _repair(self, room: Ints, swapped: np.ndarray[tuple[int], np.dtype[np.bool_]], banned: Iterable[int]) -> bool:
        """Add tensors until the limit is kept; return whether it is."""
        taste = self.random.random()
        allowed = ~swapped
        allowed[list(banned)] = False
        for _ in range(_REPAIRS_MAX):
            k = int(room.argmin()) if room.size else 0
            missing = -int(room[k]) if room.size else 0
            if missing <= 0:
                return True
            choice = np.flatnonzero(allowed & (self._free_from <= k) & (k < self._back_at))
            if not choice.size:
                return False
            if taste < 0.4:  # the smallest that is large enough, or the largest
                enough = choice[self._sizes[choice] >= missing]
                i = enough[self._sizes[enough].argmin()] if enough.size else choice[self._sizes[choice].argmax()]
            elif taste < 0.6:
                i = choice[0]
            elif taste < 0.8:
                i = choice[self._rank[choice].argmax()]
            else:
                i = choice[self.random.randrange(choice.size)]
            self._move(int(i), room, swapped)
            allowed[i] = False
        return False

    def _trim(self, room: Ints, swapped: np.ndarray[tuple[int], np.dtype[np.bool_]], needed: Iterable[int]) -> None:
        """Keep swapped tensors for which there is room, in random order."""
        choice = [i for i in np.flatnonzero(swapped).tolist() if i not in needed]
        for i in self.random.sample(choice, min(len(choice), _TRIMS_MAX)):
            span = room[self.step.free_from[i] : self.step.back_at[i]]
            if not span.size or int(span.min()) >= self.step.bytes[i]:
                self._move(i, room, swapped)
