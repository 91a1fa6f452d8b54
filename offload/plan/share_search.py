"""Chooses which optimizer state leaves memory between updates, together with the plan of forward and backward.

The controller calls it where optimizer state may move and a memory limit is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from offload.plan.bounds import IN_UPDATE, InfeasibleLimitError, Reason, least_feasible_limit, refusal
from offload.plan.cycle import Update, between_bytes, cycle_bound, cycle_bytes, freed, simulate_cycle
from offload.plan.joint_bounds import joint_bound
from offload.plan.result import Plan
from offload.plan.share import StateShare
from offload.plan.simulate import Link
from offload.plan.trace import Trace

__all__ = ["fastest_share", "update_order"]

_SHARES_MAX = 16  # shares of the state that are compared by their bounds
_EXHAUSTIVE_MAX = 12  # up to this number of tensors, a plan is searched for all that the bounds do not rule out


def update_order(count: int) -> list[int]:
    """Return the numbers of chunks in the order in which they are chosen to move.

    Those that are chosen are spread over the update, so that their copies overlap with the updates of the others, and
    each share is a part of every larger one.
    """
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [count - 1 - i for i in reversed_bits if i < count]


def fastest_share(
    trace: Trace,
    link: Link,
    limit_bytes: int,
    update: Update,
    held_bytes: int,
    make: Callable[[Trace], Plan],
    *,
    least: int = 0,
    noise: float = 0.01,
    smallest: bool = False,
) -> Plan:
    """Return the plan for the share of state with which a cycle is shortest; a smaller share that is as good wins.

    Parameters
    ----------
    trace : Trace
        Forward and backward, with all state in its base bytes.
    link : Link
        Bandwidths, latency, and what moving bytes costs the computation.
    limit_bytes : int
        Limit on the resident bytes, in bytes: during forward, backward and update.
    update : Update
        The update.
    held_bytes : int
        What is in use during the update, without this state.
    make : callable
        Returns a plan of forward and backward for a trace, within the limit.
    least : int, default 0
        The number of chunks that move anyway.
    noise : float, default 0.01
        Relative gain in time for which no more state moves.
    smallest : bool, default False
        Take the smallest share with which the limit is feasible, whatever its time.

    Returns
    -------
    Plan
        With its `state`.

    Raises
    ------
    InfeasibleLimitError
        The limit is too low even if all state moves. The error has the least limit with which all of it does.
    """
    order = update_order(len(update.chunks))
    shares = [frozenset(order[:count]) for count in range(least, len(order) + 1)]

    def fits(number: int) -> bool:
        most, between = cycle_bytes(update, shares[number])
        is_kept = not shares[number] or held_bytes + most <= limit_bytes
        return is_kept and least_feasible_limit(freed(trace, update.bytes - between)) <= limit_bytes

    first = _first(fits, len(shares))
    if first is None:
        raise _refusal(trace, limit_bytes, update, held_bytes)
    shares = shares[first : first + 1] if smallest else _spaced(shares[first:], update)
    bound = cycle_bound(trace, limit_bytes, link, update)
    least_seconds = [_least_seconds(trace, limit_bytes, link, update, moved) for moved in shares]
    searched: dict[int, tuple[float, Plan]] = {}

    def search(number: int) -> float:
        searched[number] = _with_share(trace, link, update, shares[number], bound, make)
        return searched[number][0]

    small = next(n for n, seconds in enumerate(least_seconds) if seconds <= (1 + noise) * min(least_seconds))
    seconds = search(small)
    # More room may help where the plan is slower than its bound. If most of it does, half of it may do as well.
    worth = [n for n in range(small + 1, len(shares)) if least_seconds[n] < (1 - noise) * seconds]
    if len(trace.tensors) <= _EXHAUSTIVE_MAX:
        for number, least_of_it in enumerate(least_seconds):
            if number != small and least_of_it <= (1 + noise) * seconds:
                search(number)
    elif worth and search(worth[-1]) < (1 - noise) * seconds and len(worth) > 1:
        search(worth[(len(worth) - 1) // 2])
    quickest = min(seconds for seconds, _ in searched.values())
    return searched[min(n for n, (seconds, _) in searched.items() if seconds <= (1 + noise) * quickest)][1]


def _first(fits: Callable[[int], bool], count: int) -> int | None:
    """The first number that fits, where each one behind it does too; None if neither the first nor the last does."""
    if fits(0):
        return 0
    low, high = 0, count - 1
    if not (high and fits(high)):
        return None
    while high - low > 1:
        number = (low + high) // 2
        low, high = (low, number) if fits(number) else (number, high)
    return high


def _spaced(shares: list[frozenset[int]], update: Update) -> list[frozenset[int]]:
    """At most `_SHARES_MAX` of them, the first and the last included, of which each leaves less in memory."""
    sizes = [between_bytes(update, moved) for moved in shares]
    least = list(accumulate(sizes, min))
    falling = [n for n, size in enumerate(sizes) if n == 0 or size < least[n - 1]]
    if len(falling) > _SHARES_MAX:
        step = (len(falling) - 1) / (_SHARES_MAX - 1)
        falling = [falling[round(step * i)] for i in range(_SHARES_MAX)]
    return [shares[n] for n in falling]


def _overhead(link: Link, update: Update, moved: frozenset[int]) -> float:
    return sum(link.overhead_seconds(update.chunks[i].bytes) for i in moved)


def _least_seconds(trace: Trace, limit_bytes: int, link: Link, update: Update, moved: frozenset[int]) -> float:
    """No plan with this share is faster."""
    between = between_bytes(update, moved)
    passes = joint_bound(freed(trace, update.bytes - between), limit_bytes, link)
    copies = update.bytes_of(moved) / min(link.out_bandwidth, link.in_bandwidth)
    return max(update.seconds + update.micro_batches * passes, copies) + _overhead(link, update, moved)


def _with_share(
    trace: Trace,
    link: Link,
    update: Update,
    moved: frozenset[int],
    bound: float,
    make: Callable[[Trace], Plan],
) -> tuple[float, Plan]:
    """The plan for a share, and the seconds by which shares are compared."""
    most, between = cycle_bytes(update, moved)
    plan = make(freed(trace, update.bytes - between))
    timing = simulate_cycle(plan.recomputed_trace, plan.swaps, link, update, moved)
    share = StateShare(
        update=update,
        moved=moved,
        cycle_seconds=timing.seconds,
        update_seconds=timing.update_seconds,
        bound_seconds=min(bound, timing.seconds),  # the same durations, added in another order
        between_bytes=between,
        update_bytes=most,
    )
    slowed = update.micro_batches * plan.overhead_seconds + _overhead(link, update, moved)
    return timing.seconds + slowed, replace(plan, state=share)


def _refusal(trace: Trace, limit_bytes: int, update: Update, held_bytes: int) -> InfeasibleLimitError:
    """The error for a limit that is too low even if all state moves."""
    most, between = cycle_bytes(update, range(len(update.chunks)))
    least = freed(trace, update.bytes - between)
    least_bytes = least_feasible_limit(least)
    if held_bytes + most > least_bytes:
        reasons = (
            Reason(held_bytes, f"{IN_UPDATE}: parameters, gradients, buffers"),
            Reason(most, "of optimizer state that is read or written at a time"),
        )
        return InfeasibleLimitError(limit_bytes, held_bytes + most, reasons)
    error = refusal(least, limit_bytes)
    assert error is not None  # no share fits, and this one needs least
    return error
