"""How far a slowdown that was measured from a few steps may be off."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

from offload.control.limits import Limits

__all__ = ["standard_deviation", "standard_error"]


def standard_deviation(ratios: Sequence[float]) -> float:
    """Return the standard deviation of these values, 0 if there are fewer than two.

    It is computed from the median absolute deviation, so a single value that is far off hardly changes it.
    """
    if len(ratios) < 2:
        return 0.0
    # For a normal distribution, the standard deviation is 1.4826 × the median absolute deviation.
    return 1.4826 * median(abs(ratio - median(ratios)) for ratio in ratios)


def standard_error(deviation: float, pairs: int, others: Sequence[float], limits: Limits) -> float:
    """Return the standard error of a slowdown that was measured from `pairs` steps and reference steps.

    Parameters
    ----------
    deviation
        Standard deviation of the ratios of these steps to their reference steps.
    pairs
        Number of such ratios.
    others
        The deviations of other plans. The deviation of a few ratios is uncertain, so at least half of the median of all
        deviations is assumed.
    limits
        `deviation_min`, the least deviation that is assumed.
    """
    least = max(limits.deviation_min, median([deviation, *others]) / 2)
    # The standard error of a median is 1.2533 × that of a mean. A deviation of few values is too small on average:
    # the factor `1 + 1 / (pairs - 1)` corrects this, much as Student's t does.
    return 1.2533 * max(deviation, least) * (1 + 1 / max(1, pairs - 1)) / sqrt(pairs)
