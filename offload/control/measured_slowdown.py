"""Compares a plan's measured steps with its reference steps: the slowdown, and how far it may be off.

`PlanSearch` uses it. numpy's `median`, `quantile` and `random` are not used: they import numpy.ma and the random
generators, which take memory and time in the middle of a training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from math import sqrt
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.control.limits import Limits

__all__ = ["Comparison", "compared", "computed_nodes", "lower_quartiles", "seconds_of_steps", "standard_error"]

_RESAMPLES = 64  # then the standard error is itself known to about 10 %
_OUTSIDE = 0.16  # of a normal distribution, this share is further below the mean than one standard deviation

_Rows = Sequence[Sequence[float]]
_Array = NDArray[np.float64]


class Comparison(NamedTuple):
    """The result of `compared`.

    Attributes
    ----------
    compute_seconds
        Duration of the computation without swapping.
    step_seconds
        Duration of the plan's steps.
    deviation
        The standard error that one pair of steps alone would give to the slowdown, which is the ratio of the two
        durations minus 1.
    """

    compute_seconds: float
    step_seconds: float
    deviation: float


def compared(planned: _Rows, references: _Rows, outside: Sequence[float], waits: Collection[int]) -> Comparison:
    """Compare the steps of a plan with reference steps, which alternate with them.

    Other programs are often busy for less than a step: in each step they slow a few nodes, in the next step other ones.
    So they lengthen every step, but hardly change the lower quartile of a node. Both durations are sums of such
    quartiles; the median of the seconds outside nodes is added to that of the plan's steps (`seconds_of_steps`).

    The standard error is found by resampling (bootstrap). The comparison is repeated 64 times, each time with as many
    pairs (a step and the reference step beside it) as were measured, drawn from them with replacement. Half the range
    of the middle 68 % of the results is the standard error, so a single slow step hardly changes it. (An error from
    the durations of whole steps would be larger.)

    Parameters
    ----------
    planned, references
        Seconds of each node, for each step of the plan, and for each reference step. If one has more rows than
        the other, its first rows do not count.
    outside
        Seconds of each of the plan's steps outside nodes.
    waits
        The nodes before which reference steps wait for copies (`computed_nodes`).
    """
    steps, others, more = (np.asarray(rows, dtype=float) for rows in (planned, references, outside))
    pairs = min(len(steps), len(others))
    steps, others, more = steps[-pairs:], others[-pairs:], more[-pairs:]
    is_pair = others.sum(axis=-1) > 0  # the CPU time of a thread, without that of hooks, can be zero
    if is_pair.any():
        steps, others, more = steps[is_pair], others[is_pair], more[is_pair]
    pairs = len(steps)
    compute, taken = _seconds(steps, others, more, waits)
    if pairs < 2:
        return Comparison(compute, taken, 0.0)
    ratios = []
    for numbers in _drawn(pairs):
        drawn_compute, drawn_taken = _seconds(steps[numbers], others[numbers], more[numbers], waits)
        ratios.append(drawn_taken / drawn_compute)
    ratios.sort()
    left_out = round(_OUTSIDE * len(ratios))
    half = (ratios[-1 - left_out] - ratios[left_out]) / 2
    # As with the variance of a sample: n pairs that are drawn from n vary by (n − 1) / n of what n new pairs would.
    return Comparison(compute, taken, half * pairs / sqrt(pairs - 1))


def lower_quartiles(rows: _Rows | _Array) -> _Array:
    """Return the lower quartile of each column, interpolated between the two values beside it."""
    ordered: _Array = np.sort(np.asarray(rows, dtype=float), axis=0)
    below, share = divmod(0.25 * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    quartiles: _Array = low + share * (high - low)
    return quartiles


def seconds_of_steps(planned: _Rows | _Array, outside: Sequence[float]) -> float:
    """Return how long a plan's steps take: the sum of the nodes' lower quartiles, and the median seconds outside nodes.

    Outside nodes, steps wait for copies. If every second step waits, it is the median that shows this.
    """
    return float(lower_quartiles(planned).sum()) + median(outside)


def computed_nodes(planned: _Rows | _Array, references: _Rows | _Array, waits: Collection[int]) -> _Array:
    """Return the node durations without swapping: the lower quartiles in reference steps, without the effect of waits.

    After a wait, caches are cold and threads asleep. So for the first half of the nodes from a wait to the next one, it
    is the shorter one of their quartiles in reference steps and in the plan's steps.
    """
    pairs = min(len(planned), len(references))  # quartiles of more rows would be nearer to the median
    steps, own = lower_quartiles(planned[-pairs:]), lower_quartiles(references[-pairs:])
    is_slowed = np.zeros(len(own), dtype=bool)
    for wait, end in pairwise([*sorted(waits), len(own)]):
        is_slowed[wait : (wait + end + 1) // 2] = True
    return np.where(is_slowed, np.minimum(own, steps), own)


def standard_error(deviation: float, pairs: int, others: Sequence[float], limits: Limits) -> float:
    """Return the standard error of a slowdown that was measured from `pairs` steps and reference steps.

    Parameters
    ----------
    deviation
        `Comparison.deviation` of these steps.
    pairs
        Number of such pairs.
    others
        The deviations of other plans. The deviation of a few pairs is uncertain, so at least half of the median of all
        deviations is assumed.
    limits
        `deviation_min`, the least deviation that is assumed.
    """
    least = max(limits.deviation_min, median([deviation, *others]) / 2)
    return max(deviation, least) / sqrt(pairs)


def _seconds(planned: _Array, references: _Array, outside: _Array, waits: Collection[int]) -> tuple[float, float]:
    """Return the seconds of the computation, and of the plan's steps."""
    return float(computed_nodes(planned, references, waits).sum()), seconds_of_steps(planned, outside.tolist())


@cache
def _drawn(pairs: int) -> list[list[int]]:
    random = Random(0)
    return [random.choices(range(pairs), k=pairs) for _ in range(_RESAMPLES)]
