"""Compares a plan's measured steps with its reference steps: the slowdown, and how far it may be off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.control.limits import Limits

__all__ = ["Comparison", "Rows", "compared", "standard_error", "without_waits"]

_RESAMPLES = 64
_QUANTILES = (0.16, 0.84)  # of a normal distribution, these are one standard deviation away from the mean

Rows = Sequence[Sequence[float]]
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
        What one pair of steps adds to the uncertainty of the slowdown, the ratio of the two minus 1: its standard error
        is this number, divided by about the square root of the number of pairs (`standard_error`).
    """

    compute_seconds: float
    step_seconds: float
    deviation: float


def compared(planned: Rows, references: Rows, outside: Sequence[float], waits: Collection[int]) -> Comparison:
    """Compare the steps of a plan with reference steps, which alternate with them.

    Other programs are often busy for less than a step: in each step they slow a few nodes, in the next step other ones.
    So they lengthen every step, but hardly change the median of a node. Both durations are sums of such medians. How
    much they vary is found by resampling (bootstrap): the comparison is repeated with as many pairs of steps, drawn at
    random from these pairs. The deviation of whole steps would be up to three times too large. The standard error is
    half the range of the middle 68 % of the results, so a single step that is far off hardly changes it.

    Parameters
    ----------
    planned, references
        Seconds of each node, for each step of the plan, and for each reference step.
    outside
        Seconds of each of the plan's steps outside nodes.
    waits
        The nodes before which reference steps wait for copies (`without_waits`).
    """
    steps, others = np.asarray(planned, dtype=float), np.asarray(references, dtype=float)
    more = np.asarray(outside, dtype=float)
    compute, taken = _seconds(steps, others, more, waits)
    pairs = min(len(steps), len(others))
    rows = _drawn(pairs)
    drawn = _seconds(steps[-pairs:][rows], others[-pairs:][rows], more[-pairs:][rows], waits)
    low, high = np.quantile(drawn[1] / drawn[0], _QUANTILES)
    return Comparison(float(compute), float(taken), float(high - low) / 2 * sqrt(pairs))


def without_waits(reference: _Array, planned: _Array, waits: Collection[int]) -> _Array:
    """Return the node durations without swapping: those of reference steps, without the effect of their waits.

    After a wait, caches are cold and threads asleep. So for the first half of the nodes from a wait to the next one, it
    is the shorter one of their durations in reference steps and in the plan's steps. The last axis is that of nodes.
    """
    count = reference.shape[-1]
    is_slowed = np.zeros(count, dtype=bool)
    for wait, end in pairwise([*sorted(waits), count]):
        is_slowed[wait : (wait + end + 1) // 2] = True
    return np.where(is_slowed, np.minimum(reference, planned), reference)


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
    # As with the variance of a sample: n pairs that are drawn from n vary by (n − 1) / n of what n new pairs would.
    return max(deviation, least) / sqrt(max(1, pairs - 1))


def _seconds(steps: _Array, references: _Array, outside: _Array, waits: Collection[int]) -> tuple[_Array, _Array]:
    """Return the seconds of the computation and of the plan's steps. The last two axes are those of steps and nodes."""
    planned = np.median(steps, axis=-2)
    compute = without_waits(np.median(references, axis=-2), planned, waits).sum(axis=-1)
    return compute, planned.sum(axis=-1) + np.median(outside, axis=-1)


@cache
def _drawn(pairs: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, pairs, (_RESAMPLES, pairs))
