"""Estimates the slowdowns of all tried plans from the measurements of all of them.

A measurement of few steps can be far off: on a machine where steps vary by 6 %, one of three pairs of steps is off by 4
percentage points. But the plans of a search have something in common. Their slowdown consists of what the plans predict
(waits, recomputation, hooks) and of the time by which copies slow the computation, and this time is about proportional
to the bytes that a plan moves. So each measurement says something about every plan, and so does the cost of a byte that
the calibration has measured.

The estimate is that of a normal distribution (Gaussian process regression). Before any measurement, the seconds that
each moved byte costs have the calibrated mean and a wide deviation. A plan's own deviation from the proportion is small
(`Limits.plan_spread`). A measurement deviates by its standard error. If steps hardly vary, a plan's estimate is its
measurement; if they vary much, the other plans and the calibration count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from offload.control.limits import Limits
from offload.control.tried_plan import TriedPlan

__all__ = ["estimated"]


def estimated(tried: Sequence[TriedPlan], byte_seconds: float, limits: Limits) -> tuple[list[TriedPlan], float]:
    """Estimate the slowdown of each plan, and what each moved byte costs.

    Parameters
    ----------
    tried
        The plans whose steps have been measured in this search.
    byte_seconds
        Seconds by which each moved byte is expected to slow the computation, before any measurement.
    limits
        `cost_spread`, `cost_spread_min` and `plan_spread`.

    Returns
    -------
    list of TriedPlan
        The same plans with new `slowdown` and `error`.
    float
        The estimated cost of a moved byte in seconds; at least 0.
    """
    compute = np.array([each.compute_seconds for each in tried])
    moved = np.array([float(each.moved_bytes) for each in tried]) / compute
    all_bytes = max(1, *(sum(tensor.copied_bytes for tensor in each.plan.trace.tensors) for each in tried))
    spread = limits.cost_spread * byte_seconds + limits.cost_spread_min * median(compute) / all_bytes
    expected = byte_seconds * moved
    found = np.array([each.unexplained_seconds for each in tried]) / compute - expected
    errors = np.array([each.measured_error for each in tried])
    covariance = spread**2 * np.outer(moved, moved) + limits.plan_spread**2 * np.eye(len(tried))
    weights = np.linalg.inv(covariance + np.diag(errors**2))
    corrections = covariance @ weights @ found - found
    deviations = np.sqrt(np.maximum(0.0, np.diag(covariance - covariance @ weights @ covariance)))
    plans = [
        replace(each, slowdown=each.measured + float(correction), error=limits.standard_errors * float(deviation))
        for each, correction, deviation in zip(tried, corrections, deviations, strict=True)
    ]
    return plans, max(0.0, byte_seconds + float(spread**2 * moved @ weights @ found))
